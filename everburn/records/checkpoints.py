"""Checkpoint records: which trainer state belongs to which step.

A checkpoint of step k > 0 is eligible once the ledger has step k, committed under the same lease or
an earlier one. Doesn't own the state itself: the training service does.
"""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from everburn.records.keys import checkpoint_key, checkpoints_of
from everburn.records.ledger import LedgerEntry
from everburn.records.store import ArtifactStore


class Checkpoint(BaseModel):
    """`path` is the full reference under which the training service loads it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    version: int
    path: str
    epoch: int
    base_model: str
    lora_rank: int
    adapter_seed: int


def record_checkpoint(store: ArtifactStore, checkpoint: Checkpoint) -> None:
    """Keep the record; another lease's of the same step stays."""
    key = checkpoint_key(checkpoint.step, checkpoint.epoch)
    store.put_json(key, checkpoint.model_dump(mode="json"))


def find_checkpoint(store: ArtifactStore, step: int, since: int = 0) -> Checkpoint | None:
    """The newest record of a step, of a lease whose epoch is at least `since`."""
    keys = store.keys(checkpoints_of(step))
    if not keys:
        return None
    found = Checkpoint.model_validate(store.get_json(keys[-1]))
    return found if found.epoch >= since else None


def eligible_checkpoints(store: ArtifactStore, ledger: Sequence[LedgerEntry]) -> list[Checkpoint]:
    """The checkpoints that belong to the ledger's steps, state-0 first.

    A state saved by an earlier lease than the one that committed the step doesn't belong to it:
    its gradients may have been summed in another order.
    """
    first = find_checkpoint(store, 0)
    others = (find_checkpoint(store, entry.step, since=entry.epoch) for entry in ledger)
    return [checkpoint for checkpoint in (first, *others) if checkpoint is not None]
