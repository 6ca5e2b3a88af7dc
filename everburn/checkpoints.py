"""Checkpoint records: which trainer state belongs to which step.

Owns the record. A checkpoint is a trainer's state and the run state that belongs to it, together:
one of step k > 0 is eligible once the ledger's entry k names it. Doesn't own the state itself
(the training service's).
"""

from pydantic import BaseModel, ConfigDict

from everburn.refs import checkpoint_key
from everburn.store import ArtifactStore


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
    store.put_json(checkpoint_key(checkpoint.step), checkpoint.model_dump(mode="json"))


def find_checkpoint(store: ArtifactStore, step: int) -> Checkpoint | None:
    found = store.find_json(checkpoint_key(step))
    return None if found is None else Checkpoint.model_validate(found)
