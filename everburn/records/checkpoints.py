"""Checkpoint records: which trainer state belongs to which step.

A checkpoint of step k > 0 is eligible once the ledger has step k, committed under the same lease or
an earlier one. Doesn't own the state itself: the training service does.
"""

from collections.abc import Sequence
from pathlib import PurePosixPath

from everburn.records.ids import Leased, LeaseKey
from everburn.records.keys import checkpoint_key, checkpoints_of
from everburn.records.ledger import LedgerEntry
from everburn.records.store import ArtifactStore


class Checkpoint(Leased):
    """`path` is the full reference under which the training service loads it."""

    step: int
    version: int
    path: str
    base_model: str
    lora_rank: int
    adapter_seed: int


def record_checkpoint(store: ArtifactStore, checkpoint: Checkpoint) -> None:
    """Keep the record; another lease's of the same step stays."""
    key = checkpoint_key(checkpoint.step, checkpoint.lease_key)
    store.put_json(key, checkpoint.model_dump(mode="json"))


def find_checkpoint(
    store: ArtifactStore, step: int, since: LeaseKey | None = None
) -> Checkpoint | None:
    """The newest record of a step, of the lease `since` or a newer one."""
    names = (PurePosixPath(key).stem for key in store.keys(checkpoints_of(step)))
    newest = max(map(LeaseKey.named, names), default=None)
    if newest is None or (since is not None and newest < since):
        return None
    return Checkpoint.model_validate(store.get_json(checkpoint_key(step, newest)))


def eligible_checkpoints(store: ArtifactStore, ledger: Sequence[LedgerEntry]) -> list[Checkpoint]:
    """The checkpoints that belong to the ledger's steps, state-0 first.

    A state saved by an earlier lease than the one that committed the step doesn't belong to it:
    its gradients may have been summed in another order.
    """
    first = find_checkpoint(store, 0)
    others = (find_checkpoint(store, entry.step, since=entry.lease_key) for entry in ledger)
    return [checkpoint for checkpoint in (first, *others) if checkpoint is not None]
