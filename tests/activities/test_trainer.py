"""The leases of a process, without their workflow."""

from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities import trainer as trainer_activities
from activities.failure_types import TRAINER_STATE_LOST
from activities.messages import AcquireLease, LeaseRef, OptimStep
from activities.trainer import TrainerActivities
from everburn.config import RunConfig, parse_config
from everburn.refs import RunRef
from everburn.run_folder import Owner, create_run_folder
from everburn.trainers import QuotaExceededError, TrainerStateLostError
from support.sessions import ADAM
from support.trainer import ScriptedTrainer
from support.waiting import until


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRef:
    """A run's folder. Its workflow isn't there, and is taken to be."""

    async def is_open(client: Client, workflow_id: str) -> bool:
        return True

    monkeypatch.setattr(trainer_activities, "is_open", is_open)
    run = RunRef(store=str(tmp_path), id="run")
    values = {"rollout": "task:make", "dataset": "rows.jsonl", "base_model": "tiny"}
    create_run_folder(run, parse_config(values | {"backend": "emulator"}), Owner(chain="chain"))
    return run


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QuotaExceededError("add credit"), "QuotaExceededError"),
        (TrainerStateLostError("it restarted"), TRAINER_STATE_LOST),
    ],
)
async def test_a_holder_says_as_its_operation_does_why_the_lease_ended(
    temporal_server: str, run: RunRef, error: Exception, kind: str
):
    """Either may be heard first, and a quota holds the run, where a loss is recovered from."""
    trainer = ScriptedTrainer()
    trainer.refuse("optim_step", error)

    async def open_trainer(ref: LeaseRef, config: RunConfig) -> ScriptedTrainer:
        return await trainer.open()

    activities = TrainerActivities(await Client.connect(temporal_server), open_trainer)
    ref, environment = LeaseRef(run=run, epoch=1), ActivityEnvironment()
    await environment.run(activities.acquire_lease, AcquireLease(run=run, epoch=1))
    step = OptimStep(lease=ref, step=1, adam=ADAM)
    for activity, order in ((activities.optim_step, step), (activities.hold_lease, ref)):
        with pytest.raises(ApplicationError, match=str(error)) as caught:
            await environment.run(activity, order)
        assert caught.value.type == kind
    await activities.close()
    assert trainer.count("close") == 1


async def test_sessions_are_closed_however_their_queues_workers_end(
    temporal_server: str, run: RunRef
):
    """There is no such namespace: the workers of the leases' own queues fail when they begin."""
    trainer = ScriptedTrainer()

    async def open_trainer(ref: LeaseRef, config: RunConfig) -> ScriptedTrainer:
        return await trainer.open()

    client = await Client.connect(temporal_server, namespace="nowhere")
    activities = TrainerActivities(client, open_trainer)
    for epoch in (1, 2):
        await ActivityEnvironment().run(
            activities.acquire_lease, AcquireLease(run=run, epoch=epoch)
        )
    await until(lambda: trainer.count("close") == 1, lambda: trainer.calls)
    await activities.close()
    assert (trainer.count("open"), trainer.count("close")) == (2, 2)
