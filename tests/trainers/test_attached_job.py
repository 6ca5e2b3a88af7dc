"""Whether a run may start on another's full-parameter job, where models may share weights."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fireworks.training.sdk import FiretitanServiceClient, types

from activities.messages import LeaseRef, SaveCheckpoint
from everburn.emulator.models.base_model import TINY
from everburn.records.provisioning import ProvisioningRecord, find_provisioning
from everburn.trainers.dedicated import DedicatedTrainer
from everburn.trainers.protocol import TrainerUnavailableError, TrainerUnfitError
from support.activities import lease_operations
from support.emulator import RunningEmulator, supervised
from support.places import Place
from support.sessions import ADAM, a_datum


class Job:
    """A trainer job and a deployment that another run has created."""

    def __init__(self, emulator: RunningEmulator, folder: Path) -> None:
        self.emulator = emulator
        self.folder = folder
        self.maker = Place(emulator, folder / "maker")
        assert self.maker.provisioning.advance().stage == "ready"
        record = find_provisioning(self.maker.store)
        assert record is not None
        self.provisioned: ProvisioningRecord = record

    def others_model(self) -> Any:
        """A model created without Everburn."""
        url = f"{self.emulator.url}/training/v1/rlorTrainerJobs/everburn/{self.provisioned.job_id}"
        service = FiretitanServiceClient(base_url=url, api_key="fw_local")
        return service.create_training_client(base_model=TINY, lora_rank=0)

    def attached(self, name: str, **fields: Any) -> Place:
        """A new run on the job, with a ready deployment."""
        trainer = {"job_id": self.provisioned.job_id}
        place = Place(self.emulator, self.folder / name, trainer=trainer, **fields)
        assert place.provisioning.advance().stage == "ready"
        return place


@pytest.fixture
async def job(emulator: RunningEmulator, tmp_path: Path) -> AsyncIterator[Job]:
    emulator.admin(
        "POST",
        "unknowns",
        {"applies_repetitions": True, "shares_full_parameters": True, "keeps_gradients": True},
    )
    job = Job(emulator, tmp_path)
    yield job
    emulator.admin("POST", "unknowns", {})
    job.maker.provisioning.clean_up()


async def train(trainer: DedicatedTrainer) -> dict[str, float]:
    await trainer.forward_backward([a_datum()], "importance_sampling", {})
    return await trainer.optim_step(ADAM)


async def test_a_run_starts_on_an_untrained_job(job: Job) -> None:
    trainer = await job.attached("first").open(1)
    assert await train(trainer)
    await trainer.close()


@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        ("hot_load_status", {"kind": "drop"}),
        ("forward", {"kind": "status", "status": 410}),
        ("optim_step", {"kind": "drop"}),
    ],
)
async def test_a_lease_that_fails_during_the_check_is_retried(
    job: Job, operation: str, fault: dict[str, Any]
) -> None:
    """Nothing has been trained, so no recovery is needed."""
    place = job.attached("first")
    job.emulator.plan_fault(operation, **fault)
    with pytest.raises(TrainerUnavailableError):
        await place.open(1)
    assert job.emulator.admin("GET", "faults") == {"faults": []}
    trainer = await place.open(1)
    assert (await train(trainer))["num_sequences"] == 1
    await trainer.close()


async def test_a_run_does_not_start_on_a_job_with_checkpoints_of_another_run(job: Job) -> None:
    first = await job.attached("first").open(1)
    start = await first.save_checkpoint("state-0")
    await train(first)
    await first.publish("policy-0001-e1")
    await first.close()
    second = job.attached("second")
    refusal = f"{job.provisioned.job_id} trains .* saved policy-0001-e1-.* Set init_from_checkpoint"
    with pytest.raises(TrainerUnfitError, match=refusal):
        await second.open(1)
    third = await job.attached("third", init_from_checkpoint=start).open(1)
    await third.load_checkpoint(start)
    assert (await train(third))["step"] == 1
    await third.close()


async def test_a_run_does_not_start_on_a_trained_job_without_checkpoints(job: Job) -> None:
    model = job.others_model()
    model.forward_backward([supervised([2, 3, 4, 5])], "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=0.05)).result()
    place = job.attached("first")
    with pytest.raises(TrainerUnfitError, match=f"doesn't hold {TINY}: its logprobs"):
        await place.open(1)
    assert not place.store.keys("checkpoints")


async def test_gradients_of_others_are_dropped(job: Job) -> None:
    job.others_model().forward_backward([supervised([2, 3, 4, 5])], "cross_entropy").result()
    trainer = await job.attached("first").open(1)
    assert (await train(trainer))["num_sequences"] == 1
    await trainer.close()


async def test_a_run_does_not_start_if_the_deployment_serves_another_snapshot(job: Job) -> None:
    """The second lease ignores checkpoints of the job, which may be the first's."""
    place = job.attached("first")
    trainer = await place.open(1)
    await trainer.publish("policy-0000-e1")
    with pytest.raises(TrainerUnfitError, match=r"can't be checked: .* serves policy-0000-e1-"):
        await place.open(2)
    await trainer.close()


async def test_a_run_with_a_checkpoint_loads_it_whatever_the_job_has(job: Job) -> None:
    place = job.attached("first")
    first = await place.open(1)
    order = SaveCheckpoint(
        lease=LeaseRef(run=place.run, incarnation=0, lease_epoch=1),
        step=0,
        version=0,
        name="state-0",
    )
    path = (await lease_operations(first, place.run).save_checkpoint(order)).path
    step = (await train(first))["step"]
    second = await place.open(2)
    await second.load_checkpoint(path)
    assert (await train(second))["step"] == step
    for trainer in (first, second):
        await trainer.close()
