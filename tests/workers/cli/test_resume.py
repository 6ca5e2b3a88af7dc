"""An ended run continues from its state, and its ledger stays valid."""

import json
import uuid
from pathlib import Path

import pytest
from temporalio.client import Client

from everburn.config import parse_config
from everburn.learning.group import keep_group, skip_group
from everburn.records.checkpoints import Checkpoint, record_checkpoint
from everburn.records.commands import Command, record_command
from everburn.records.ids import GroupKey, RunRef, StoredRef
from everburn.records.keys import group_key
from everburn.records.ledger import commit
from everburn.records.run_folder import (
    Owner,
    ServerAddress,
    create_run_folder,
    record_server,
    stored_config,
)
from everburn.records.store import ArtifactStore
from support.command_line import Everburn, free_ports, wait_until
from support.records import a_group, a_member, an_entry
from support.script import spread
from support.scripted_run import scripted_run
from support.sums import write_sums
from workers.cli.resume import is_running
from workers.cli.runs import require_ended
from workers.connection import Server
from workers.errors import BadInputError
from workflows.restore import rebuilt_state
from workflows.run.train_run import TrainRun


def steps(everburn: Everburn) -> list[int]:
    """The committed steps of the run, in the order of its metrics."""
    file = everburn.folder / "runs" / "first" / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [record["rollout/step"] for record in records if "train/lr" in record]


def test_a_stopped_run_is_resumed_to_its_end_and_verified(everburn: Everburn) -> None:
    write_sums(everburn.folder, 40, max_head_offpolicy_versions=1, learning_rate=0.01)

    first = everburn.start("run", "run.json", "--id", "first", *free_ports())
    wait_until(lambda: len(steps(everburn)) >= 3, "three steps")
    first.terminate()
    assert first.wait(timeout=120) == 0, everburn.output
    before = steps(everburn)
    assert len(before) < 20
    assert f"stopped after {len(before)} steps" in everburn.output
    assert "checkpoint of step 0: everburn/run-" in everburn.output

    unknown = everburn("resume", "first", "--set", "init_from_checkpoint=state-99")
    assert unknown.returncode == 2
    assert "has no checkpoint 'state-99': it has state-0" in unknown.stderr

    # From its first checkpoint: the ledger's steps are replayed, none is repeated.
    wanted = ("--set", "learning_rate=0.001", "--set", "init_from_checkpoint=state-0")
    resumed = everburn("resume", "first", *wanted)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "trained after 20 steps on 40 rows" in resumed.stdout
    assert "trainer sessions" not in resumed.stdout, "nothing was lost"
    assert steps(everburn) == list(range(1, 21))
    rates = json.loads((everburn.folder / "runs/first/ledger/000020.json").read_text())["adam"]
    assert rates["learning_rate"] == 0.001

    verified = everburn("verify", "first")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "20 steps re-executed, 40 rows trained once, 0 rejected" in verified.stdout

    again = everburn("resume", "first", "--set", "base_model=other")
    assert again.returncode == 2
    assert "base_model can't change while a run continues" in again.stderr


def test_a_changed_file_is_found_by_verification(shared_stack: Everburn) -> None:
    write_sums(shared_stack.folder, 4, "two-steps.json", learning_rate=0.01)
    done = shared_stack("run", "two-steps.json", "--id", "changed")
    assert done.returncode == 0, done.stdout + done.stderr

    folder = shared_stack.folder / "runs" / "changed"
    rollout = folder / "rollouts/row-000001.0/completion-0.parquet"
    kept = rollout.read_bytes()
    rollout.write_bytes(kept[:-1])
    check_refuted(shared_stack, "changed", f"{rollout} has changed since it was recorded")
    rollout.unlink()
    check_refuted(shared_stack, "changed", f"{rollout} isn't in the store")
    rollout.write_bytes(kept)

    entry = folder / "ledger/000002.json"
    changed = json.loads(entry.read_text())
    changed["groups"] = json.loads((entry.parent / "000001.json").read_text())["groups"]
    entry.write_text(json.dumps(changed))

    verified = shared_stack("verify", "changed")
    assert verified.returncode == 1
    assert "was trained twice: in steps 1 and 2" in verified.stderr


def check_refuted(everburn: Everburn, run: str, problem: str) -> None:
    """Verification fails and names the file."""
    verified = everburn("verify", run)
    assert verified.returncode == 1
    assert f"run {run} doesn't agree with its ledger: {problem}" in verified.stderr


def test_steps_without_a_checkpoint_are_reported_as_not_compared(
    shared_stack: Everburn,
) -> None:
    fields = {"learning_rate": 0.01, "save_final_checkpoint": False}
    write_sums(shared_stack.folder, 6, "unsaved.json", **fields)
    done = shared_stack("run", "unsaved.json", "--id", "unsaved")
    assert done.returncode == 0, done.stdout + done.stderr

    verified = shared_stack("verify", "unsaved")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "run unsaved: 3 steps re-executed, 6 rows trained once, 0 rejected" in verified.stdout
    assert "no weights could be compared" in verified.stdout
    assert "not compared: steps 1 to 3" in verified.stdout
    assert "agrees" not in verified.stdout

    steps = shared_stack.folder / "runs/unsaved/steps/000003"
    submission = next(steps.rglob("submission-0.json"))
    submission.unlink()
    check_refuted(shared_stack, "unsaved", f"{submission} isn't in the store")


STEPS = 40
"""Steps of a run that saved each of them."""


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> RunRef:
    """Two rows per step; after the last step one row is complete, one rejected, one started."""
    fields = {"prompt_groups_per_step": 2, "rollout": "support.tasks:make_rollout_fn"}
    run = scripted_run(tmp_path_factory.mktemp("long"), spread, 2 * STEPS + 4, **fields)
    store = ArtifactStore.of(run)
    stored = StoredRef(key="rollouts/any", sha256="0" * 64)
    for step in range(STEPS + 1):
        cursors = (2 * step - 2, 2 * step - 1)
        if step:
            commit(store, an_entry(step, (str(cursors[0]), str(cursors[1]))))
            for cursor in cursors:
                keep_group(store, a_group(GroupKey(cursor=cursor), [a_member(stored)]))
        checkpoint = {"step": step, "version": step, "epoch": 1, "path": f"everburn/state-{step}"}
        model = {"base_model": "tiny", "lora_rank": 4, "adapter_seed": 0}
        record_checkpoint(store, Checkpoint.model_validate(checkpoint | model))
    last = 2 * STEPS
    keep_group(store, a_group(GroupKey(cursor=last), [a_member(stored)], version=STEPS))
    skip_group(store, GroupKey(cursor=last + 1), STEPS, 4)
    keep_group(store, a_group(GroupKey(cursor=last + 2), [], outcome="incomplete"))
    return run


@pytest.mark.parametrize(
    ("wanted", "steps"),
    [
        (None, [0, STEPS - 2, STEPS - 1, STEPS]),
        ("everburn/state-30", [0, 28, 29, 30]),
        ("state-1", [0, 1]),
    ],
)
def test_a_resumed_run_remembers_as_many_checkpoints_as_a_running_one(
    long_run: RunRef, wanted: str | None, steps: list[int]
) -> None:
    state = rebuilt_state(long_run, stored_config(long_run), 0.0, wanted)
    assert [checkpoint.step for checkpoint in state.checkpoints.eligible] == steps
    assert state.checkpoints.last == f"everburn/state-{steps[-1]}"


def test_resuming_a_long_run_reads_untrained_groups_only(
    long_run: RunRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, read = ArtifactStore.get, []

    def noted(store: ArtifactStore, ref: str | StoredRef) -> bytes:
        read.append(str(ref))
        return get(store, ref)

    monkeypatch.setattr(ArtifactStore, "get", noted)
    state = rebuilt_state(long_run, stored_config(long_run), 0.0)
    last = 2 * STEPS
    untrained = [GroupKey(cursor=cursor) for cursor in (last, last + 1, last + 2)]
    assert [key for key in read if key.startswith("groups/")] == [*map(group_key, untrained)]
    assert [group.key for group in state.producer.queue.groups] == untrained[:1]
    cursor = state.producer.cursor
    assert cursor.next == last + 3
    assert (cursor.returned, cursor.resolved_count) == ([last + 2], last + 1)


async def test_only_the_run_of_the_folder_is_followed(tmp_path: Path, temporal_server: str) -> None:
    write_sums(tmp_path, 4)
    config = parse_config(json.loads((tmp_path / "run.json").read_text()))
    server = Server(temporal_server)
    at = f" --address {temporal_server}"
    client = await Client.connect(temporal_server)
    run = RunRef(store=str(tmp_path / "runs"), id=f"resumed-{uuid.uuid4().hex[:8]}")
    with pytest.raises(BadInputError, match=f"server at {temporal_server} doesn't know it"):
        await is_running(server, run, changes=True, ended=False)
    assert not await is_running(server, run, changes=True, ended=True)

    handle = await client.start_workflow(TrainRun.run, {}, id=run.id, task_queue="of-nobody")
    assert handle.first_execution_run_id is not None
    create_run_folder(run, config, Owner(chain=handle.first_execution_run_id))
    assert await is_running(server, run, changes=False, ended=False)
    with pytest.raises(BadInputError, match="hasn't ended and continues while") as refusal:
        await is_running(server, run, changes=True, ended=True)
    assert f"--name reconfigure {server.options} --input" in str(refusal.value)
    assert f"`everburn stop {run.id}{at}`" in str(refusal.value)

    other = RunRef(store=str(tmp_path / "others"), id=run.id)
    create_run_folder(other, config, Owner(chain="that of another server"))
    with pytest.raises(BadInputError, match=f"not that of {other.folder}.*{run.id}{at}`"):
        await is_running(server, other, changes=False, ended=False)

    await handle.terminate()
    assert not await is_running(server, run, changes=True, ended=False)
    with pytest.raises(BadInputError, match="may be running: its folder doesn't say"):
        await is_running(server, other, changes=True, ended=False)


async def test_the_recorded_server_is_asked_if_a_run_has_ended(
    tmp_path: Path, temporal_server: str, dead_url: str
) -> None:
    """The user may give no server, or another one."""
    write_sums(tmp_path, 4)
    config = parse_config(json.loads((tmp_path / "run.json").read_text()))
    client = await Client.connect(temporal_server)
    run = RunRef(store=str(tmp_path / "runs"), id=f"resumed-{uuid.uuid4().hex[:8]}")
    handle = await client.start_workflow(TrainRun.run, {}, id=run.id, task_queue="of-nobody")
    assert handle.first_execution_run_id is not None
    create_run_folder(run, config, Owner(chain=handle.first_execution_run_id))
    store = ArtifactStore.of(run)
    elsewhere = Server(dead_url.removeprefix("http://"))

    with pytest.raises(BadInputError, match=r"may be running.*no local stack.*add --ended"):
        await require_ended(run, None, ended=False)
    record_server(store, ServerAddress(address=temporal_server, namespace="default"))
    for asked in (None, elsewhere):
        with pytest.raises(BadInputError, match=f"is running at {temporal_server}. Stop it first"):
            await require_ended(run, asked, ended=False)
    await handle.terminate()
    for asked in (None, elsewhere):
        await require_ended(run, asked, ended=False)
    record_server(store, ServerAddress(address=elsewhere.address, namespace="default"))
    with pytest.raises(BadInputError, match=f"Temporal doesn't answer at {elsewhere.address}"):
        await require_ended(run, None, ended=False)
    record_command(store, Command(at=0.0, text="stopped", ending="stopped"))
    await require_ended(run, None, ended=False)


def test_an_open_run_is_not_resumed_from_another_folder(
    shared_stack: Everburn, tmp_path: Path
) -> None:
    write_sums(shared_stack.folder, 400, "live.json")
    live = shared_stack.start("run", "live.json", "--id", "live")
    folder = shared_stack.folder / "runs" / "live"
    wait_until(lambda: (folder / "ledger/000001.json").exists(), "the first step")

    refused = Everburn(tmp_path)("resume", str(folder))
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "run live is running at 127.0.0.1:" in refused.stderr
    assert not (tmp_path / ".everburn").exists(), "no stack was started for it"

    live.terminate()
    assert live.wait(timeout=120) == 0, shared_stack.output
    assert json.loads((folder / "owner.json").read_text())["life"] == 0
