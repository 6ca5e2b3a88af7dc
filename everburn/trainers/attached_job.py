"""Guard for runs that start on an existing trainer job without loading a state.

All models on a full-parameter trainer may share weights and Adam moments, and the service can't
reset them. So such a run starts only if the job shows no earlier training. Owns that check. Doesn't
own the run's earlier models (fencing.py).
"""

import asyncio
from typing import Protocol

from everburn.config import RunConfig
from everburn.records.provisioning import ProvisioningRecord
from everburn.records.store import ArtifactStore
from everburn.trainers.backends import api_key, api_root
from everburn.trainers.hotload import Hotloader
from everburn.trainers.probe import INITIAL_PROBE, mean_gap
from everburn.trainers.protocol import Snapshot, TrainerStateLostError, TrainerUnfitError

ALTERNATIVES = (
    "Set init_from_checkpoint, which replaces weights and optimizer, or another trainer.job_id, or "
    "none: then the run creates its own job"
)


class Scorer(Protocol):
    """The methods of a session that the comparison needs."""

    async def forward(self, sequences: list[list[int]]) -> list[list[float]]: ...

    async def served_logprobs(self, snapshot: Snapshot, tokens: list[int]) -> list[float]: ...


def starts_from_job_state(
    store: ArtifactStore, config: RunConfig, record: ProvisioningRecord
) -> bool:
    """Whether a lease trains on the present state of another's job. Once the run has a checkpoint,
    each lease loads one."""
    return not (
        record.own_job
        or config.lora_rank
        or config.init_from_checkpoint is not None
        or store.keys("checkpoints")
    )


def require_no_checkpoints(config: RunConfig, job_id: str) -> None:
    """Raises TrainerUnfitError if an earlier model of the job has saved a checkpoint. Blocks.

    Valid only before the run's first lease, which may save one itself.
    """
    from fireworks.training.sdk.fireworks_client import FireworksClient

    with FireworksClient(api_key=api_key(config), base_url=api_root(config)) as control:
        names = sorted(
            str(row["name"]).rpartition("/")[2] for row in control.list_checkpoints(job_id)
        )
    if names:
        raise TrainerUnfitError(
            f"trainer job {job_id} trains all parameters, and an earlier model of it has saved "
            f"{', '.join(names[:3])}: its weights, gradients and Adam moments may still be "
            f"there. {ALTERNATIVES}"
        )


async def require_base_model(
    trainer: Scorer, hotloader: Hotloader, config: RunConfig, job_id: str
) -> None:
    """Check that the trainer's logprobs equal those of the deployment, which serves the base model.

    Raises:
        TrainerUnfitError: they differ, or the deployment can't serve the base model.
    """
    status = await asyncio.to_thread(hotloader.serving, None)
    deployment = f"deployment {hotloader.deployment_id}"
    if status.identity is not None:
        raise _uncheckable(job_id, f"{deployment} serves {status.identity}")
    handle = await asyncio.to_thread(hotloader.sampler_handle)
    (trained,) = await trainer.forward([INITIAL_PROBE])
    try:
        base = Snapshot(path=config.base_model, handle=handle, shared=True)
        served = await trainer.served_logprobs(base, INITIAL_PROBE)
    except TrainerStateLostError as error:
        raise _uncheckable(job_id, f"{deployment} doesn't serve it either: {error}") from error
    gap = mean_gap(trained, served)
    if not gap <= config.served_tolerance:
        raise TrainerUnfitError(
            f"trainer job {job_id} doesn't hold {config.base_model}: its logprobs differ by "
            f"{gap:.3g} nats on average from the base model's, more than publication_tolerance = "
            f"{config.served_tolerance:g}. It has been trained. {ALTERNATIVES}"
        )


def _uncheckable(job_id: str, reason: str) -> TrainerUnfitError:
    return TrainerUnfitError(
        f"whether trainer job {job_id}, which trains all parameters, still holds the base model "
        f"can't be checked: {reason}. {ALTERNATIVES}; or remove deployment.deployment_id"
    )
