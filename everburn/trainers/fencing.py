"""Fencing on a dedicated trainer, where models may share weights and gradients.

A new model id doesn't keep an old holder out of a full-parameter trainer. So each holder is
recorded, the next one unloads the models of those before it, and a state that was loaded is held
to what it computed when it was saved. Owns both records. Doesn't own leases (lease.py) or which
snapshot is served (hotload.py).
"""

import hashlib

from pydantic import BaseModel, ConfigDict

from everburn.learning.group import GroupManifest
from everburn.learning.rollout_file import read_rollout
from everburn.records.store import ArtifactStore, through_outages
from everburn.trainers.probe import BEFORE_ANY_COMPLETION, LONGEST, mean_gap
from everburn.trainers.protocol import Trainer, TrainerStateLostError

HOLDERS = "holders"
FINGERPRINTS = "fingerprints"
TOLERANCE = 0.02
"""Nats, on average over a completion's tokens: the same weights on the same trainer, perhaps in
other kernels. Another run's state is far from it; one step at a small learning rate (1e-6) isn't,
and passes unseen."""


class Holder(BaseModel):
    """A model that was opened for a lease, and trained unless another attempt at it was granted.
    unload_asked: when a later one first asked in vain for its unloading, in seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epoch: int
    job_id: str
    model_id: str
    unload_asked: float | None = None


class Fingerprint(BaseModel):
    """What a saved state computed: the logprob of each token after the first. tokens: a recorded
    completion, or before there is any the sequence that the initial policy is probed with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str
    tokens: list[int]
    logprobs: list[float]


def record_holder(store: ArtifactStore, holder: Holder) -> None:
    """To be done before the model is trained: who comes next must find it. Beside those of other
    attempts at the same lease, which may come late."""
    key = f"{HOLDERS}/epoch-{holder.epoch:06d}-{_digest(holder.model_id)}.json"
    store.put_json(key, holder.model_dump(mode="json"))


def earlier_holders(store: ArtifactStore, job_id: str, epoch: int) -> list[Holder]:
    """Those of the job under superseded epochs, and other attempts at this one, the newest first.
    To be asked before there is a model of one's own."""
    found = (Holder.model_validate(store.get_json(key)) for key in store.keys(HOLDERS))
    others = [holder for holder in found if holder.job_id == job_id and holder.epoch <= epoch]
    return sorted(others, key=lambda holder: -holder.epoch)


async def record_fingerprint(store: ArtifactStore, trainer: Trainer, checkpoint: str) -> None:
    """Keep what the state that has just been saved computes."""
    # In a thread: the run may have tens of thousands of groups, and the loop heartbeats the lease.
    recorded = await through_outages(recorded_tokens, store)
    tokens = recorded or BEFORE_ANY_COMPLETION
    (logprobs,) = await trainer.forward([tokens])
    fingerprint = Fingerprint(checkpoint=checkpoint, tokens=tokens, logprobs=logprobs)
    await through_outages(put_fingerprint, store, fingerprint)


def put_fingerprint(store: ArtifactStore, fingerprint: Fingerprint) -> None:
    store.put_json(_key(fingerprint.checkpoint), fingerprint.model_dump(mode="json"))


async def check_fingerprint(store: ArtifactStore, trainer: Trainer, checkpoint: str) -> None:
    """See that the trainer holds the state that was loaded.

    Raises:
        TrainerStateLostError: it holds something else.
    """
    found = await through_outages(store.find_json, _key(checkpoint))
    if found is None:
        return
    fingerprint = Fingerprint.model_validate(found)
    (logprobs,) = await trainer.forward([fingerprint.tokens])
    gap = mean_gap(fingerprint.logprobs, logprobs)
    if not gap <= TOLERANCE:
        raise TrainerStateLostError(
            f"after {checkpoint} was loaded, log-probabilities differ by {gap:.3g} nats on average "
            "from what they were when it was saved: another holder may have changed the weights"
        )


def recorded_tokens(store: ArtifactStore) -> list[int] | None:
    """Those of the run's first completion that is recorded, as far as they are cheap to score."""
    for key in store.keys("groups"):
        for member in GroupManifest.model_validate(store.get_json(key)).members:
            return list(read_rollout(store, member.stored)[1].segments[0].tokens[:LONGEST])
    return None


def _key(checkpoint: str) -> str:
    return f"{FINGERPRINTS}/{_digest(checkpoint)}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
