"""When `everburn reap` accepts that a run has ended, and how it cleans up job and deployment."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from everburn.config import Entrypoint, parse_config
from everburn.emulator.models.base_model import TINY
from everburn.records.commands import Command, record_command
from everburn.records.ids import RunRef
from everburn.records.keys import sandbox_key
from everburn.records.provisioning import find_provisioning
from everburn.records.run_folder import Owner, create_run_folder
from everburn.records.store import ArtifactStore
from everburn.rollouts.sandboxes import SandboxRecord
from everburn.trainers.jobs import RunProvisioning
from support.command_line import Everburn
from support.emulator import RunningEmulator, running_emulator
from workers.cli.reap import reap_run
from workers.errors import BadInputError
from workflows.queues import ORCHESTRATOR_QUEUE
from workflows.run.train_run import TrainRun

KEY = "fw_a_key_of_this_test"
CONFIG = {
    "rollout": "task:make",
    "dataset": "rows.jsonl",
    "base_model": TINY,
    "backend": "emulator",
    "lora_rank": 4,
}


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEmulator]:
    with running_emulator(tmp_path_factory.mktemp("reaping")) as running:
        yield running


def a_run(folder: Path, base_url: str, **fields: Any) -> RunRef:
    """The folder of a run that isn't running."""
    values = {
        "rollout": "task:make",
        "dataset": "rows.jsonl",
        "base_model": TINY,
        "tokenizer_model": "not needed",
        "backend": "dedicated",
        "trainer": {"training_shape": "accounts/everburn/trainingShapes/tiny"},
        "base_url": base_url,
    }
    run = RunRef(store=str(folder / "runs"), id="dead")
    create_run_folder(run, parse_config(values | fields), Owner(first_execution_id=str(folder)))
    return run


def provision(run: RunRef, emulator: RunningEmulator) -> str:
    """Create the job and deployment as workers do; returns their id."""
    from everburn.records.run_folder import stored_config

    assert RunProvisioning(run, stored_config(run)).advance().stage == "ready"
    record = find_provisioning(ArtifactStore.of(run))
    assert record is not None and record.job_id == record.deployment_id
    assert emulator.admin("GET", "state")["jobs"][record.job_id] == "JOB_STATE_RUNNING"
    return record.job_id


def test_the_job_and_deployment_of_a_dead_run_are_cleaned_up(
    everburn: Everburn, emulator: RunningEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIREWORKS_API_KEY", KEY)
    run = a_run(everburn.folder, emulator.url)
    name = provision(run, emulator)

    done = everburn("reap", run.id, "--ended")  # fails without the key
    assert done.returncode == 1
    (left,) = (line for line in done.stdout.splitlines() if line.startswith("left: "))
    assert "the environment variable FIREWORKS_API_KEY is empty" in left

    for _ in range(2):
        done = everburn("reap", run.id, "--ended", FIREWORKS_API_KEY=KEY)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "run dead: 0 sandboxes reaped, 0 left" in done.stdout
        assert f"deployment {name} is deleted; trainer job {name} is deleted" in done.stdout
        assert KEY not in done.stdout
    state = emulator.admin("GET", "state")
    assert state["jobs"][name] == "JOB_STATE_DELETED"
    assert name not in state["deployments"]


def test_resources_that_the_configuration_keeps_are_kept_and_reported(
    everburn: Everburn, emulator: RunningEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIREWORKS_API_KEY", KEY)
    run = a_run(everburn.folder, emulator.url, deployment={"cleanup": "keep"})
    name = provision(run, emulator)
    done = everburn("reap", run.id, "--ended", FIREWORKS_API_KEY=KEY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"deployment {name} is kept, and costs as long as it has replicas" in done.stdout
    assert name in emulator.admin("GET", "state")["deployments"]


def test_a_stopped_emulator_leaves_no_job_or_deployment(
    everburn: Everburn, emulator: RunningEmulator, dead_url: str
) -> None:
    run = a_run(everburn.folder, emulator.url, backend="emulator-dedicated")
    provision(run, emulator)
    path = ArtifactStore.of(run).folder
    config = Path(path) / "config.json"
    config.write_text(config.read_text().replace(emulator.url, dead_url))
    done = everburn("reap", run.id, "--ended")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run dead: 0 sandboxes reaped, 0 left" in done.stdout


def left_behind(folder: Path, run_id: str, chain: str) -> tuple[RunRef, Path]:
    """The folder of a run that has registered a sandbox, and the sandbox."""
    run = RunRef(store=str(folder / "runs"), id=run_id)
    create_run_folder(run, parse_config(CONFIG), Owner(first_execution_id=chain))
    sandbox = folder / "sandbox"
    sandbox.mkdir()
    reaper = Entrypoint(name="shutil:rmtree", kwargs={"path": str(sandbox)})
    record = SandboxRecord(reaper=reaper, at=0.0, where="completion 0")
    key = sandbox_key("row-000000.0.completion-0", "1")
    ArtifactStore.of(run).put_json(key, record.model_dump(mode="json"))
    return run, sandbox


async def reaped(folder: Path, run: RunRef, address: str | None = None, ended: bool = False) -> int:
    """How many sandboxes were reaped."""
    done = await reap_run(run.folder, address, "default", folder, ended=ended)
    assert done.reaped.failures == []
    return done.reaped.count


async def test_a_run_that_may_be_running_elsewhere_is_not_reaped(
    tmp_path: Path, dead_url: str
) -> None:
    run, sandbox = left_behind(tmp_path, "dead", chain="1")
    unknown = r"may be running.*no local stack runs in this folder.*add --ended"
    with pytest.raises(BadInputError, match=unknown):
        await reaped(tmp_path, run)
    with pytest.raises(BadInputError, match=r"may be running.*Temporal doesn't answer at"):
        await reaped(tmp_path, run, dead_url.removeprefix("http://"))
    assert sandbox.exists()
    assert await reaped(tmp_path, run, ended=True) == 1
    assert not sandbox.exists()


async def test_a_recorded_end_is_valid_until_the_run_is_resumed(tmp_path: Path) -> None:
    run, sandbox = left_behind(tmp_path, "dead", chain="1")
    store = ArtifactStore.of(run)
    record_command(store, Command(at=0.0, text="stopped", ending="stopped"))
    record_command(store, Command(at=1.0, text="resumed", incarnation=1))
    with pytest.raises(BadInputError, match="its folder doesn't say that it has ended"):
        await reaped(tmp_path, run)
    record_command(
        store, Command(at=2.0, text="no judge", incarnation=1, number=1, ending="failed")
    )
    assert await reaped(tmp_path, run) == 1
    assert not sandbox.exists()


async def test_a_server_knows_if_its_own_runs_have_ended(
    tmp_path: Path, temporal_server: str
) -> None:
    client = await Client.connect(temporal_server)

    async def started(run_id: str) -> WorkflowHandle[Any, Any]:
        # No worker serves it: it neither starts nor ends.
        return await client.start_workflow(
            TrainRun.run, {}, id=run_id, task_queue=f"{ORCHESTRATOR_QUEUE}-of-nobody"
        )

    handle = await started(f"reaped-{uuid.uuid4().hex[:8]}")
    assert handle.first_execution_run_id is not None
    run, sandbox = left_behind(tmp_path, handle.id, handle.first_execution_run_id)
    # The folder at the start of a resumed incarnation.
    record_command(ArtifactStore.of(run), Command(at=0.0, text="stopped", ending="stopped"))
    for ended in (False, True):
        with pytest.raises(
            BadInputError,
            match=f"run {run.id} is running.*stop {run.id} --address {temporal_server}`",
        ):
            await reaped(tmp_path, run, temporal_server, ended)

    await handle.terminate()
    for run_id in (handle.id, "dead"):
        other = RunRef(store=str(tmp_path / "other"), id=run_id)
        create_run_folder(
            other, parse_config(CONFIG), Owner(first_execution_id="that of another server")
        )
        with pytest.raises(BadInputError, match=f"server at {temporal_server} doesn't know it"):
            await reaped(tmp_path, other, temporal_server)

    (Path(run.folder) / "commands" / "000-000000.json").unlink()
    assert await reaped(tmp_path, run, temporal_server) == 1
    assert not sandbox.exists()
