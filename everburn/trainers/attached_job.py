"""A trainer job that isn't the run's own, where the run begins with what it finds.

Models on a full-parameter trainer may be one, and nothing that the service offers makes one new
again: not its weights, not Adam's moments. So a run that loads nothing begins only where nobody
seems to have trained. Owns that judgement. Doesn't own the run's own earlier models (fencing.py).
"""

from typing import Protocol

from everburn.config import RunConfig
from everburn.records.provisioning import ResourceRecord
from everburn.records.store import ArtifactStore
from everburn.trainers.backends import api_key, api_root
from everburn.trainers.hotload import Hotloader
from everburn.trainers.probe import BEFORE_ANY_COMPLETION, mean_gap
from everburn.trainers.protocol import Snapshot, TrainerStateLostError, TrainerUnfitError

WAYS_OUT = (
    "Give init_from_checkpoint, which replaces weights and optimizer, or name another "
    "trainer.job_id, or none: then the run makes a job of its own"
)


class Scorer(Protocol):
    """What the comparison needs of a session."""

    async def forward(self, sequences: list[list[int]]) -> list[list[float]]: ...

    async def served_logprobs(self, snapshot: Snapshot, tokens: list[int]) -> list[float]: ...


def begins_as_found(store: ArtifactStore, config: RunConfig, resources: ResourceRecord) -> bool:
    """Whether a lease of the run trains on from what is on a job of others. Once the run has a
    checkpoint, each lease loads one."""
    return not (
        resources.own_job
        or config.lora_rank
        or config.init_from_checkpoint is not None
        or store.keys("checkpoints")
    )


def require_nothing_saved(config: RunConfig, job_id: str) -> None:
    """Raises TrainerUnfitError: an earlier model of the job has saved something. Blocks.

    To be called before the run itself has had a lease: it may save something under its first.
    """
    from fireworks.training.sdk.fireworks_client import FireworksClient

    with FireworksClient(api_key=api_key(config), base_url=api_root(config)) as control:
        found = sorted(
            str(row["name"]).rpartition("/")[2] for row in control.list_checkpoints(job_id)
        )
    if found:
        raise TrainerUnfitError(
            f"trainer job {job_id} trains all parameters, and an earlier model of it has saved "
            f"{', '.join(found[:3])}: its weights, gradients and Adam's moments may still be "
            f"there. {WAYS_OUT}"
        )


async def require_base_model(
    trainer: Scorer, hotloader: Hotloader, config: RunConfig, job_id: str
) -> None:
    """See that the trainer computes what the deployment does, which serves the base model.

    Raises:
        TrainerUnfitError: it doesn't, or there is nothing to compare it with.
    """
    import asyncio

    found = await asyncio.to_thread(hotloader.serving, None)
    where = f"deployment {hotloader.deployment_id}"
    if found.identity is not None:
        raise _uncheckable(job_id, f"{where} serves {found.identity}")
    handle = await asyncio.to_thread(hotloader.sampler_handle)
    (own,) = await trainer.forward([BEFORE_ANY_COMPLETION])
    try:
        base = Snapshot(path=config.base_model, handle=handle, shared=True)
        served = await trainer.served_logprobs(base, BEFORE_ANY_COMPLETION)
    except TrainerStateLostError as error:
        raise _uncheckable(job_id, f"{where} doesn't serve it either: {error}") from error
    gap = mean_gap(own, served)
    if not gap <= config.served_tolerance:
        raise TrainerUnfitError(
            f"trainer job {job_id} doesn't hold {config.base_model}: its log-probabilities differ "
            f"by {gap:.3g} nats on average from the base model's, more than publication_tolerance "
            f"= {config.served_tolerance:g}. Somebody has trained there. {WAYS_OUT}"
        )


def _uncheckable(job_id: str, why: str) -> TrainerUnfitError:
    return TrainerUnfitError(
        f"whether trainer job {job_id}, which trains all parameters, still holds the base model "
        f"can't be checked: {why}. {WAYS_OUT}; or leave deployment.deployment_id out"
    )
