"""A run waits while its store fails. A long outage ends the lease; finished rollouts aren't
repeated."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio.common import RetryPolicy

from activities import liveness
from everburn.learning.batch import Batch
from everburn.records import store
from everburn.records.run_folder import Owner
from everburn.records.store import ArtifactStore, StoreError
from everburn.rollouts import attempt as rollout_attempt
from everburn.trainers.protocol import TrainerStateLostError
from support.failing_disk import FailingDisk
from support.farm import Farm, Run, Start
from support.script import Script
from support.waiting import until
from workflows.children import retries
from workflows.messages import StopRequest
from workflows.run import recorder, recovery
from workflows.run.train_run import TrainRun

HELD_OUT = {"name": "support.tasks:rows", "kwargs": {"count": 3}}
MUTATIONS = ("forward_backward", "publish", "save_checkpoint", "replay_step", "prepare_batch")


def prepare(batch: Batch) -> list[list[list[float]]]:
    return [[[each.reward] for each in group.completions] for group in batch.groups]


@pytest.fixture
def no_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of the folder of all runs; activities retry at once."""
    quick = RetryPolicy(maximum_attempts=2, initial_interval=timedelta(milliseconds=10))
    monkeypatch.setattr(recorder, "CREATE_ATTEMPTS", quick)
    monkeypatch.setattr(recovery, "BACKOFF", (0.1,))
    volume = tmp_path / "volume"
    volume.write_text("not mounted")
    return volume


async def reports_folder_error(run: Run) -> bool:
    """Whether the run reports the error of its folder."""
    said = (await run.status()).waiting_for
    return said.startswith("the run's folder: ") and "Not a directory" in said


async def test_a_run_continues_once_its_folder_can_be_made(
    start_tuned: Start, tunable_farm: Farm, no_volume: Path
):
    run = await tunable_farm.start(Script(), no_volume, rows=1)
    await until(lambda: reports_folder_error(run))
    await asyncio.to_thread(no_volume.unlink)
    assert (await run.result()).steps == 1


@pytest.mark.parametrize("drain", [False, True])
async def test_a_run_whose_folder_cannot_be_made_can_be_stopped(
    start_tuned: Start, tunable_farm: Farm, no_volume: Path, drain: bool
):
    run = await tunable_farm.start(Script(), no_volume, rows=1)
    await until(lambda: reports_folder_error(run))
    await run.handle.signal(TrainRun.stop, StopRequest(drain=drain))
    result = await run.result()
    assert (result.stopped, result.steps) == (True, 0)
    status = await run.status()
    assert (status.phase, status.notes) == ("stopped", ["stopped before it began to train"])
    assert run.script.begun == [] and run.trainer.calls == []


async def test_a_short_store_outage_costs_no_session(start: Start, monkeypatch: pytest.MonkeyPatch):
    """Each read and write of a mutation or a replay, before and after it sends a request."""
    disks = [FailingDisk(activity) for activity in MUTATIONS]
    for disk in disks:
        disk.install(monkeypatch)
    script = Script(prepare=prepare)
    script.trainer.fail_once("optim_step", TrainerStateLostError("the service restarted"), after=1)
    run = await start(script, rows=2)
    await run.result()
    assert [entry.lease_epoch for entry in run.ledger] == [1, 2], "lost once, to the service"
    failed = [{path.rpartition(f"{run.id}/")[2] for _, path in disk.failed} for disk in disks]
    assert failed[0] >= {
        "groups/row-000000.0.json",
        "rollouts/row-000000.0/completion-0.parquet",
        "steps/000001/lease-000001/submission-0.json",
        "steps/000001/lease-000001/submission-0-metrics.json",
    }
    assert failed[1] >= {"publications/lease-000001/000001.json"}
    assert failed[2] >= {"checkpoints/state-0/lease-000001.json"}
    assert failed[3] >= {"ledger/000001.json", "steps/000001/lease-000001/submission-0.json"}
    assert failed[4] >= {"groups/row-000000.0.json", run.ledger[0].prepared.advantages.key}


@pytest.mark.parametrize(
    ("activity", "file"),
    [
        ("prepare_batch", "groups/row-000000.0.json"),
        ("forward_backward", "groups/row-000000.0.json"),
        ("forward_backward", "steps/000001/lease-000001/submission-0-metrics.json"),
        ("publish", "publications/lease-000001/000001.json"),
    ],
)
async def test_a_long_store_outage_costs_a_session_and_no_more(
    start: Start, monkeypatch: pytest.MonkeyPatch, activity: str, file: str
):
    """Before the first request, with accumulated gradients, and after the update."""
    monkeypatch.setattr(store, "OUTAGE_PATIENCE", 0.0)
    disk = FailingDisk(activity, f"*/{file}", times=1)
    disk.install(monkeypatch)
    run = await start(Script(prepare=prepare), rows=2)
    result = await run.result()
    assert len(disk.failed) == 1
    assert (result.steps, run.trained) == (2, ["0", "1"])
    assert [entry.lease_epoch for entry in run.ledger] == [2, 2]
    again = run.trainer.calls.index("load_checkpoint scripted/state-0")
    assert "close" in run.trainer.calls[:again]
    assert run.trainer.calls[again:].count("optim_step") == 2


async def test_a_store_outage_during_a_recovery_starts_the_recovery_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store, "OUTAGE_PATIENCE", 0.0)
    disk = FailingDisk("replay_step", "*/steps/000001/lease-000001/submission-0.json", times=1)
    disk.install(monkeypatch)
    script = Script()
    script.trainer.fail_once("optim_step", TrainerStateLostError("the service restarted"), after=1)
    run = await start(script, rows=2)
    await run.result()
    assert len(disk.failed) == 1
    assert [entry.lease_epoch for entry in run.ledger] == [1, 3]


async def test_a_lease_is_held_even_if_the_owner_file_cannot_be_read(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    """The owner is read before a session is opened: a failure afterwards would leave the session
    open."""
    find, failed = liveness.find_owner, []

    def find_unless_first(store: ArtifactStore) -> Owner | None:
        found = find(store)
        if found is not None and not failed:
            failed.append(found)
            raise StoreError("can't read the owner: Input/output error")
        return found

    monkeypatch.setattr(liveness, "find_owner", find_unless_first)
    run = await start(Script(), rows=1)
    await run.result()
    assert failed
    assert [entry.lease_epoch for entry in run.ledger] == [1]
    assert (run.trainer.count("open"), run.trainer.count("close")) == (1, 1)


async def test_a_store_outage_during_rollouts_samples_nothing_twice(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retries, "BACKOFF", (0.01,))
    kinds = {"rollout": "*/rollouts/*.parquet", "evaluate_shard": "*/evaluations/*/row-*"}
    disks = [FailingDisk(kind, pattern, reads=False) for kind, pattern in kinds.items()]
    for disk in disks:
        disk.install(monkeypatch)
    run = await start_tuned(Script(), rows=1, evaluation_dataset=HELD_OUT)
    await run.result()
    assert [len(disk.failed) for disk in disks] == [2, 2 * 3]
    assert len(run.script.begun) == 2 + 2 * 3


async def test_a_long_store_outage_counts_as_no_rollouts_failure(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    """Each read and write of an attempt: here, one counted failure would end the run."""
    monkeypatch.setattr(retries, "BACKOFF", (0.01,))
    monkeypatch.setattr(retries, "MAX_FAILURES", 1)
    monkeypatch.setattr(rollout_attempt, "STORE_PATIENCE", -3600.0)
    monkeypatch.setattr(store, "OUTAGE_PATIENCE", 0.0)
    disks = [FailingDisk("rollout"), FailingDisk("evaluate_shard")]
    for disk in disks:
        disk.install(monkeypatch)
    run = await start_tuned(
        Script(), rows=1, evaluation_dataset=HELD_OUT, on_any_rollout_failure="fail"
    )
    result = await run.result()
    assert run.trained == ["0"] and result.evaluations.keys() == {0, 1}
    assert all(not group.lost for group in run.groups)
    last = run.metrics("producer/event")[-1]
    assert last["producer/recoverable_errors_total"] == 0
    failed = [{path.rpartition(f"{run.id}/")[2] for _, path in disk.failed} for disk in disks]
    assert failed[0] >= {"owner.json", "rows.jsonl", "rollouts/row-000000.0/completion-1.parquet"}
    assert failed[1] >= {"evaluations/000000/row-000002.json", "evaluations/000001/shard-0000.json"}


async def test_a_store_outage_does_not_repeat_an_evaluation_function(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    disk = FailingDisk("evaluate_function", "*/figures.json", reads=False)
    disk.install(monkeypatch)
    called: list[int] = []

    def evaluate(step: int, rollout_fn: object) -> dict[str, float]:
        called.append(step)
        return {"skill": 1.0}

    run = await start(Script(evaluate=evaluate), rows=1)
    result = await run.result()
    assert called == [0, 1] and len(disk.failed) == 2
    assert result.evaluations[1]["eval/skill"] == 1.0
