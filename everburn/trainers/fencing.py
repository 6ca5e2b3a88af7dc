"""Fencing on a dedicated trainer, where models may share weights and gradients.

Each holder is recorded, the next one unloads earlier models, and a loaded state must compute the
logprobs that it had when it was saved. Owns both records. Doesn't own leases (lease.py) or which
snapshot is served (hotload.py).
"""

import hashlib

from pydantic import BaseModel, ConfigDict

from everburn.learning.group import GroupManifest
from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import Leased, LeaseKey
from everburn.records.store import ArtifactStore, through_outages
from everburn.trainers.probe import INITIAL_PROBE, MAX_SEQUENCE, mean_gap
from everburn.trainers.protocol import Trainer, TrainerStateLostError

HOLDERS = "holders"
FINGERPRINTS = "fingerprints"
TOLERANCE = 0.02
"""Nats per token, on average: allows for other kernels with the same weights. Another run's state
differs far more; one step at a small learning rate (1e-6) isn't detected."""


class Holder(Leased):
    """A model that was opened for a lease. unload_requested_at: time (seconds since 1970) of the
    first failed request of a later holder to unload it."""

    job_id: str
    model_id: str
    unload_requested_at: float | None = None


class Fingerprint(BaseModel):
    """Logprobs of a saved state, for each token after the first. tokens: a recorded completion, or
    INITIAL_PROBE if there is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str
    tokens: list[int]
    logprobs: list[float]


def record_holder(store: ArtifactStore, holder: Holder) -> None:
    """Record a holder before its model is trained, so that later holders find it. Other attempts at
    the same lease have separate records."""
    key = f"{HOLDERS}/{holder.lease_key.name}-{_digest(holder.model_id)}.json"
    store.put_json(key, holder.model_dump(mode="json"))


def earlier_holders(store: ArtifactStore, job_id: str, lease: LeaseKey) -> list[Holder]:
    """Holders of the job up to this lease (other attempts included), newest first. Call it
    before the own model is recorded."""
    holders = (Holder.model_validate(store.get_json(key)) for key in store.keys(HOLDERS))
    earlier = [h for h in holders if h.job_id == job_id and h.lease_key <= lease]
    return sorted(earlier, key=lambda holder: holder.lease_key, reverse=True)


async def record_fingerprint(store: ArtifactStore, trainer: Trainer, checkpoint: str) -> None:
    # In a thread: listing groups can take seconds, and the loop sends the lease's heartbeats.
    tokens = await through_outages(recorded_tokens, store) or INITIAL_PROBE
    (logprobs,) = await trainer.forward([tokens])
    fingerprint = Fingerprint(checkpoint=checkpoint, tokens=tokens, logprobs=logprobs)
    await through_outages(put_fingerprint, store, fingerprint)


def put_fingerprint(store: ArtifactStore, fingerprint: Fingerprint) -> None:
    store.put_json(_key(fingerprint.checkpoint), fingerprint.model_dump(mode="json"))


async def check_fingerprint(store: ArtifactStore, trainer: Trainer, checkpoint: str) -> None:
    """Check that the trainer has the loaded state.

    Raises:
        TrainerStateLostError: it has another.
    """
    recorded = await through_outages(store.find_json, _key(checkpoint))
    if recorded is None:
        return
    fingerprint = Fingerprint.model_validate(recorded)
    (logprobs,) = await trainer.forward([fingerprint.tokens])
    gap = mean_gap(fingerprint.logprobs, logprobs)
    if not gap <= TOLERANCE:
        raise TrainerStateLostError(
            f"after {checkpoint} was loaded, logprobs differ by {gap:.3g} nats on average from "
            "those when it was saved: another holder may have changed the weights"
        )


def recorded_tokens(store: ArtifactStore) -> list[int] | None:
    """The first tokens of a recorded completion; None if there is none."""
    for key in store.keys("groups"):
        for member in GroupManifest.model_validate(store.get_json(key)).members:
            return list(read_rollout(store, member.stored)[1].segments[0].tokens[:MAX_SEQUENCE])
    return None


def _key(checkpoint: str) -> str:
    return f"{FINGERPRINTS}/{_digest(checkpoint)}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
