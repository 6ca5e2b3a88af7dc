"""The leases of a trainer worker, without their workflow."""

import asyncio
from pathlib import Path

import pytest
from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from activities.failure_types import FailureKind
from activities.liveness import RunLiveness
from activities.messages import LeaseGrant, LeaseRef, LoadCheckpoint, OptimStep
from activities.trainer import TrainerActivities
from everburn.config import RunConfig, parse_config
from everburn.records.ids import RunRef
from everburn.records.run_folder import Owner, create_run_folder
from everburn.trainers.protocol import (
    KeyRefusedError,
    QuotaExceededError,
    TrainerRejectedError,
    TrainerStateLostError,
)
from support.activities import execute
from support.sessions import ADAM
from support.trainer import ScriptedTrainer
from support.waiting import until


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRef:
    """A run's folder. It has no workflow; the activities take it to be open."""

    async def is_alive(self: RunLiveness, run: RunRef, incarnation: int | None = None) -> bool:
        return True

    async def awaits(self: RunLiveness, attempt: activity.Info) -> bool:
        return True

    monkeypatch.setattr(RunLiveness, "is_alive", is_alive)
    monkeypatch.setattr(RunLiveness, "awaits", awaits)
    return a_run(tmp_path, "run")


def a_run(store: Path, name: str) -> RunRef:
    run = RunRef(store=str(store), id=name)
    values = {"rollout": "task:make", "dataset": "rows.jsonl", "base_model": "tiny"}
    create_run_folder(
        run, parse_config(values | {"backend": "emulator"}), Owner(first_execution_id="chain")
    )
    return run


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QuotaExceededError("add credit"), "QuotaExceededError"),
        (TrainerStateLostError("it restarted"), FailureKind.TRAINER_STATE_LOST),
    ],
)
async def test_holder_and_operation_report_the_same_lease_failure(
    temporal_server: str, run: RunRef, error: Exception, kind: str
):
    """Either report may arrive first, and an exhausted quota must hold the run, not start a
    recovery."""
    trainer = ScriptedTrainer()
    trainer.refuse("optim_step", error)

    async def open_trainer(ref: LeaseRef, config: RunConfig) -> ScriptedTrainer:
        return await trainer.open()

    activities = TrainerActivities(await Client.connect(temporal_server), open_trainer)
    ref = LeaseRef(run=run, incarnation=0, lease_epoch=1)
    await execute(activities.acquire_lease, LeaseRef(run=run, incarnation=0, lease_epoch=1))
    step = OptimStep(lease=ref, step=1, adam=ADAM)
    operations = activities.held[ref].operations
    for operation, order in ((operations.optim_step, step), (activities.hold_lease, ref)):
        with pytest.raises(ApplicationError, match=str(error)) as caught:
            await execute(operation, order)
        assert caught.value.type == kind
    await activities.close()
    assert trainer.count("close") == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyRefusedError("the key has expired"), "KeyRefusedError"),
        (TrainerRejectedError("no such model"), FailureKind.TRAINER_STATE_LOST),
    ],
)
async def test_a_session_that_refuses_its_holder_ends_its_lease(
    temporal_server: str, run: RunRef, error: Exception, kind: str
):
    """The lease ends at once, not after the queue of operations is empty."""

    class Refusing(ScriptedTrainer):
        async def probe(self) -> None:
            raise error

    trainer = Refusing()

    async def open_trainer(ref: LeaseRef, config: RunConfig) -> ScriptedTrainer:
        return await trainer.open()

    activities = TrainerActivities(await Client.connect(temporal_server), open_trainer)
    ref = LeaseRef(run=run, incarnation=0, lease_epoch=1)
    await acquiring(activities, run)
    operations = activities.held[ref].operations
    with pytest.raises(ApplicationError, match=str(error)) as caught:
        await execute(activities.hold_lease, ref)
    assert caught.value.type == kind
    with pytest.raises(ApplicationError, match=str(error)) as caught:
        await execute(operations.optim_step, OptimStep(lease=ref, step=1, adam=ADAM))
    assert caught.value.type == FailureKind.TRAINER_STATE_LOST
    await activities.close()
    assert trainer.calls == ["open", "close"]


async def test_sessions_are_closed_even_if_the_workers_of_their_queues_fail(
    temporal_server: str, run: RunRef
):
    """The namespace doesn't exist, so the workers of the leases' own queues fail at their start."""
    trainer = ScriptedTrainer()

    async def open_trainer(ref: LeaseRef, config: RunConfig) -> ScriptedTrainer:
        return await trainer.open()

    client = await Client.connect(temporal_server, namespace="nowhere")
    activities = TrainerActivities(client, open_trainer)
    for lease_epoch in (1, 2):
        await execute(
            activities.acquire_lease, LeaseRef(run=run, incarnation=0, lease_epoch=lease_epoch)
        )
    await until(lambda: trainer.count("close") == 1, lambda: trainer.calls)
    await activities.close()
    assert (trainer.count("open"), trainer.count("close")) == (2, 2)


async def test_a_process_that_ends_closes_all_its_sessions_concurrently(
    temporal_server: str, run: RunRef, tmp_path: Path
):
    """Each close may take a while, and the supervisor of the process doesn't wait for long."""
    runs = [run, a_run(tmp_path, "another")]
    both = asyncio.Barrier(len(runs))

    class Meeting(ScriptedTrainer):
        async def close(self) -> None:
            await super().close()
            await both.wait()

    async def open_trainer(ref: LeaseRef, config: RunConfig) -> ScriptedTrainer:
        return await Meeting().open()

    activities = TrainerActivities(await Client.connect(temporal_server), open_trainer)
    await asyncio.gather(*(acquiring(activities, each) for each in runs))
    await asyncio.wait_for(activities.close(), 20)


async def test_attempts_at_one_lease_share_its_session(temporal_server: str, run: RunRef):
    """A frozen process can be assigned its own retry while its first attempt opens a session."""
    trainer = ScriptedTrainer()
    opening = trainer.hold("open")

    async def open_trainer(ref: LeaseRef, config: RunConfig) -> ScriptedTrainer:
        return await trainer.open()

    activities = TrainerActivities(await Client.connect(temporal_server), open_trainer)
    attempts = [acquiring(activities, run) for _ in range(3)]
    await trainer.reached("open")
    opening.open()
    first, *others = await asyncio.gather(*attempts, acquiring(activities, run))
    assert others == [first] * 3

    ref = LeaseRef(run=run, incarnation=0, lease_epoch=1)
    load = LoadCheckpoint(lease=ref, step=3, path="state-3")
    operations = activities.held[ref].operations
    await execute(operations.load_checkpoint, load)
    await execute(operations.optim_step, OptimStep(lease=ref, step=4, adam=ADAM))
    await activities.close()
    assert trainer.calls == ["open", "load_checkpoint state-3", "optim_step", "close"]


async def test_a_session_that_no_attempt_waits_for_is_closed(temporal_server: str, run: RunRef):
    trainer = ScriptedTrainer()
    opening = trainer.hold("open")

    async def open_trainer(ref: LeaseRef, config: RunConfig) -> ScriptedTrainer:
        return await trainer.open()

    activities = TrainerActivities(await Client.connect(temporal_server), open_trainer)
    given_up = acquiring(activities, run)
    await trainer.reached("open")
    given_up.cancel()
    await asyncio.wait([given_up])
    successor = acquiring(activities, run)  # gets its own session
    await trainer.reached("open", times=2)
    opening.open()
    await successor
    await until(lambda: trainer.count("close") == 1, lambda: trainer.calls)
    await activities.close()
    assert (trainer.count("open"), trainer.count("close")) == (2, 2)


def acquiring(activities: TrainerActivities, run: RunRef) -> asyncio.Task[LeaseGrant]:
    """An attempt at the run's first lease."""
    order = LeaseRef(run=run, incarnation=0, lease_epoch=1)
    return asyncio.ensure_future(execute(activities.acquire_lease, order))
