"""The leases of a process, without their workflow."""

from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities.messages import AcquireLease, LeaseRef
from activities.trainer import TrainerActivities
from everburn.config import RunConfig, parse_config
from everburn.refs import RunRef
from everburn.run_folder import Owner, create_run_folder
from support.trainer import ScriptedTrainer
from support.waiting import until


@pytest.fixture
def run(tmp_path: Path) -> RunRef:
    run = RunRef(store=str(tmp_path), id="run")
    values = {"rollout": "task:make", "dataset": "rows.jsonl", "base_model": "tiny"}
    create_run_folder(run, parse_config(values | {"backend": "emulator"}), Owner(chain="chain"))
    return run


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
