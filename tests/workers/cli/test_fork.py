"""A fork starts from another run's state, doesn't need that run, and has its own ledger."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from everburn.config import Entrypoint
from everburn.emulator.training.checkpoints import weights_digest
from everburn.records.checkpoints import find_checkpoint
from everburn.records.commands import read_commands
from everburn.records.ids import RunRef
from everburn.records.ledger import read_ledger
from everburn.records.store import ArtifactStore
from support.command_line import Everburn, wait_until
from support.sums import write_sums
from workers.cli.fork import plan_fork
from workers.cli.resume import ended_run
from workers.connection import Server
from workers.errors import BadInputError
from workers.stack.folder import StackFolder
from workflows.restore import rebuilt_state
from workflows.run.train_run import TrainRun


@pytest.fixture(scope="module")
def everburn(shared_stack: Everburn) -> Everburn:
    """A folder in which a run of four steps, `first`, has ended."""
    fields = {"max_head_offpolicy_versions": 1, "learning_rate": 0.01, "dcp_save_interval": 2}
    write_sums(shared_stack.folder, 8, "forked.json", **fields)
    done = shared_stack("run", "forked.json", "--id", "first")
    assert done.returncode == 0, done.stdout + done.stderr
    return shared_stack


def store_of(everburn: Everburn, run: str) -> ArtifactStore:
    return ArtifactStore.of(RunRef(store=str(everburn.folder / "runs"), id=run))


def check_verified(everburn: Everburn, run: str, steps: int, rows: int) -> None:
    done = everburn("verify", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{steps} steps re-executed, {rows} rows trained once" in done.stdout


def test_a_fork_continues_from_its_step_without_its_origin(everburn: Everburn) -> None:
    done = everburn("fork", "first", "--at-step", "3", "--id", "second", "--set", "epochs=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "forked from run first at step 3" in done.stdout
    assert "trained after 8 steps on 16 rows" in done.stdout

    first, second = store_of(everburn, "first"), store_of(everburn, "second")
    past, taken = read_ledger(first)[:3], read_ledger(second)
    assert taken[:3] == past
    assert min(entry.lease_epoch for entry in taken[3:]) > max(entry.lease_epoch for entry in past)
    assert [entry.changes for entry in taken[3:] if entry.changes] == [{"epochs": 2}]
    assert second.get_json("origin.json")["run"]["id"] == "first"
    status = everburn("status", "second")
    assert "forked from run first at step 3" in status.stdout

    folder = everburn.folder / "runs" / "first"
    folder.rename(folder.with_name("away"))
    try:
        check_verified(everburn, "second", steps=8, rows=16)
    finally:
        folder.with_name("away").rename(folder)
    check_verified(everburn, "first", steps=4, rows=8)


def test_replayed_weights_equal_those_of_the_origin(everburn: Everburn) -> None:
    """Without the checkpoint of the step itself, which the test compares with."""
    first = store_of(everburn, "first")
    saved = find_checkpoint(first, 4)
    assert saved is not None
    record = Path(first.path("checkpoints/state-4"))
    record.rename(record.with_name("away"))
    try:
        done = everburn("fork", "first", "--at-step", "4", "--id", "same")
    finally:
        record.with_name("away").rename(record)
    assert done.returncode == 0, done.stdout + done.stderr
    again = find_checkpoint(store_of(everburn, "same"), 4)
    assert again is not None and again.path != saved.path
    home = StackFolder(everburn.folder).emulator_home
    assert weights_digest(home, again.path) == weights_digest(home, saved.path)


def test_a_running_run_continues_after_a_fork(everburn: Everburn) -> None:
    """The fork has a Python loss, which the verification imports from the folder."""
    long = everburn.start("run", "forked.json", "--id", "long", "--set", "epochs=100")
    parent = store_of(everburn, "long")
    wait_until(lambda: len(read_ledger(parent)) >= 3, "three steps")
    changes = ["--set", "extras.scale=2", "--set", "learning_rate=0.001", "--set", "epochs=1"]
    changes += ["--set", 'loss={"name": "sums:loss"}']
    done = everburn("fork", "long", "--at-step", "2", "--id", "branch", *changes)
    assert done.returncode == 0, done.stdout + done.stderr
    # The task changed: rollouts of the old one aren't trained.
    assert "with 0 untrained groups" in done.stdout
    long.terminate()
    assert long.wait(timeout=120) == 0, everburn.output
    check_verified(everburn, "branch", steps=4, rows=8)
    assert everburn("verify", "long").returncode == 0
    rates = [entry.adam.learning_rate for entry in read_ledger(store_of(everburn, "branch"))]
    assert rates == [0.01, 0.01, 0.001, 0.001]
    losses = [entry.loss for entry in read_ledger(store_of(everburn, "branch"))]
    assert losses == ["grpo", "grpo", *[Entrypoint(name="sums:loss")] * 2]


def test_a_fork_takes_over_the_commands_of_its_origin(everburn: Everburn) -> None:
    """A resume takes over all commands, a fork those before its step."""
    running = everburn.start("run", "forked.json", "--id", "told", "--set", "epochs=8")
    store = store_of(everburn, "told")
    wait_until(lambda: len(read_ledger(store)) >= 1, "a step")
    tell(everburn, "told", TrainRun.reconfigure, {"learning_rate": 0.002})
    wait_until(lambda: 0.002 in rates(store), "a step at the new rate")
    tell(everburn, "told", TrainRun.pause)
    tell(everburn, "told", TrainRun.reconfigure, {"learning_rate": 0.003, "dcp_save_interval": 3})
    running.terminate()
    assert running.wait(timeout=120) == 0, everburn.output
    before = rates(store)
    # A sealed batch is finished at the new rate, and may be the last.
    assert set(before) <= {0.01, 0.002, 0.003}

    def planned(step: int) -> float:
        plan = plan_fork("told", step, "other", [], everburn.folder)
        return plan.file.config.learning_rate

    at = read_commands(store)[0].step
    assert [planned(step) for step in (0, at, at + 1)] == [0.01, 0.01, 0.002]
    _, file, _ = ended_run("told", [], everburn.folder)
    assert (file.config.learning_rate, file.config.dcp_save_interval) == (0.003, 3)

    resumed = everburn("resume", "told")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "the changes that run told received: dcp_save_interval=3, learning_rate=0.003" in (
        resumed.stdout
    )
    assert rates(store)[: len(before)] == before
    assert set(rates(store)[len(before) :]) == {0.003}
    told = [command for command in read_commands(store) if command.checkpoint is None]
    assert [command.text for command in told] == [
        *("reconfigure learning_rate", "pause", "reconfigure dcp_save_interval, learning_rate"),
        *("stop", "stopped", "resumed", "completed"),
    ]
    check_verified(everburn, "told", steps=32, rows=64)


def test_resume_follows_a_run_that_has_not_ended(everburn: Everburn) -> None:
    """After a crash, `resume` is right for open and ended runs."""
    left = everburn.start("run", "forked.json", "--id", "left", "--set", "epochs=100")
    store = store_of(everburn, "left")
    wait_until(lambda: len(read_ledger(store)) >= 1, "a step")
    left.kill()

    changed = everburn("resume", "left", "--set", "learning_rate=0.002")
    assert changed.returncode == 2
    assert "run left hasn't ended and continues while" in changed.stderr

    resumed = everburn.start("resume", "left")
    wait_until(lambda: re.search(r"step [1-9]\d*/400", everburn.output), "its progress")
    assert "run left hasn't ended and continues; Ctrl-C asks it to stop" in everburn.output
    resumed.terminate()
    assert resumed.wait(timeout=120) == 0, everburn.output
    assert "stopped after" in everburn.output
    assert [command.text for command in read_commands(store) if command.ending] == ["stopped"]


def rates(store: ArtifactStore) -> list[float]:
    return [entry.adam.learning_rate for entry in read_ledger(store)]


def tell(everburn: Everburn, run: str, update: Any, *arguments: Any) -> None:
    """Execute an update of the run."""

    async def execute() -> None:
        state = StackFolder(everburn.folder).find()
        assert state is not None
        client = await Server.of_stack(state).connect()
        await client.get_workflow_handle(run).execute_update(update, *arguments)

    asyncio.run(execute())


@pytest.mark.parametrize(
    ("name", "step", "run_id", "changes", "error"),
    [
        ("nowhere", 1, "x", [], "there is no run in"),
        ("first", 5, "x", [], "has committed 4 steps so far: it can be forked at step 0 to 4"),
        ("first", 1, "first", [], "exists already: choose another --id"),
        ("first", 1, ".x", [], "isn't a valid run id"),
        ("first", 1, "x", ["base_model=other"], "base_model can't change in a fork"),
        ("first", 1, "x", ["lora_rank=8"], "lora_rank can't change in a fork"),
        ("first", 1, "x", ["dataset=rows.jsonl"], "dataset can't change in a fork"),
        ("first", 1, "x", ["init_from_checkpoint=state-2"], "weights and optimizer are those of"),
        ("first", 1, "x", ["learning_rate=-1"], "learning_rate"),
        ("first", 1, "x", ["learnin_rate=1"], "did you mean learning_rate"),
    ],
)
def test_an_impossible_fork_is_rejected_before_anything_starts(
    everburn: Everburn, name: str, step: int, run_id: str, changes: list[str], error: str
) -> None:
    before = sorted(path.name for path in (everburn.folder / "runs").iterdir())
    with pytest.raises(BadInputError, match=re.escape(error)):
        plan_fork(name, step, run_id, changes, everburn.folder)
    assert sorted(path.name for path in (everburn.folder / "runs").iterdir()) == before


def test_a_run_in_an_object_store_is_found_by_its_url(everburn: Everburn, tmp_path: Path) -> None:
    bucket, local = f"memory://bucket/{tmp_path.name}", everburn.folder / "runs" / "first"
    url = f"{bucket}/first"
    MemoryFileSystem().put(f"{local}/", f"{url}/", recursive=True)

    run, file, _ = ended_run(url, ["learning_rate=0.02"], tmp_path)
    assert (run.folder, file.config.store) == (url, bucket)
    state = rebuilt_state(run, file.config, 0.0)
    assert (state.step.committed, state.run) == (4, run)

    fork = plan_fork(url, 3, "second", [], tmp_path)
    assert (fork.make().step.committed, fork.run.folder) == (3, f"{bucket}/second")
    ledger = read_ledger(ArtifactStore.of(fork.run))
    assert ledger == read_ledger(store_of(everburn, "first"))[:3]

    check_verified(everburn, f"file://{local}", steps=4, rows=8)


def test_a_run_without_a_saved_state_cannot_be_forked(everburn: Everburn) -> None:
    checkpoints = Path(store_of(everburn, "first").path("checkpoints"))
    checkpoints.rename(checkpoints.with_name("away"))
    try:
        with pytest.raises(BadInputError, match="no checkpoint of step 4 or before"):
            plan_fork("first", 4, "none", [], everburn.folder)
    finally:
        checkpoints.with_name("away").rename(checkpoints)


def test_an_id_that_the_server_knows_is_rejected_before_the_copy(
    everburn: Everburn,
) -> None:
    folder = everburn.folder / "runs" / "first"
    moved = folder.with_name("moved")
    folder.rename(moved)
    try:
        done = everburn("fork", "moved", "--at-step", "4", "--id", "first")
        assert done.returncode == 2
        assert "there is a run 'first' already" in done.stderr
        assert not folder.exists()
    finally:
        moved.rename(folder)
