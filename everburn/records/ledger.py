"""The ledger: one record per committed optimizer step, append-only.

Owns the record and its commit: atomic, idempotent, never changed afterwards. Doesn't own the
metrics streams (metrics.py) or what the run was told (commands.py), although a record keeps those
of its step.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from everburn.config import Entrypoint
from everburn.learning.losses import LossConfig
from everburn.records.commands import Control
from everburn.records.ids import Ref, StoredRef
from everburn.records.keys import LEDGER, ledger_key
from everburn.records.store import ArtifactStore


class LedgerConflictError(RuntimeError):
    """Two different records claim the same step: some writer was not fenced."""


class AdamParams(BaseModel):
    """Hyper-parameters of one optimizer step, as sent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    normalization: str


class PreparedBatch(Ref):
    """What `prepare_batch` made of a step's batch: the file of its advantages, and which groups and
    how many datums (segments) have one other than zero.

    groups: as refs.encode_groups writes them; in the ledger, always as ranges.
    """

    advantages: StoredRef
    groups: str
    datums: int


class LedgerEntry(BaseModel):
    """Everything that optimizer step `step` was made of.

    version: published by this step. attempts: how often the step was begun; a lost trainer begins
        it again. groups: the batch, and digests: of each group's manifest, which names its
        rollouts with theirs. submissions: manifests in the order in which their gradients were
        added up. prepared: where advantages are `prepare_batch`'s and not those of the manifests.
        snapshot: of the version; the previous one's when `updated` is false. seconds: since the
        previous publication.
    """

    model_config = ConfigDict(extra="forbid")

    step: int
    version: int
    epoch: int
    attempts: int
    updated: bool
    groups: list[str]
    digests: list[str]
    submissions: list[StoredRef]
    prepared: PreparedBatch | None = None
    loss: str | Entrypoint
    loss_config: LossConfig
    adam: AdamParams
    snapshot: str
    checkpoint: str | None = None
    changes: dict[str, JsonValue] = Field(default_factory=dict)
    """Of the configuration, since the previous step."""
    controls: list[Control] = Field(default_factory=list)
    """What the run was told since the previous step."""
    seconds: float
    metrics: dict[str, float | int | bool]


MADE_OF = (
    *("version", "groups", "digests", "submissions", "prepared", "loss", "loss_config"),
    *("updated", "adam"),
)
"""What a step is, whoever commits it."""


def commit(store: ArtifactStore, entry: LedgerEntry) -> LedgerEntry:
    """Append a step. Committing the same step again returns what was committed first.

    Raises:
        LedgerConflictError: the step was committed as something else, or its predecessor is
            missing.
    """
    if entry.step > 1 and not store.exists(ledger_key(entry.step - 1)):
        missing = entry.step - 1
        raise LedgerConflictError(f"step {entry.step} can't follow: step {missing} is missing")
    store.put_json(ledger_key(entry.step), entry.model_dump(mode="json"), once=True)
    found = read_entry(store, entry.step)
    for name in MADE_OF:
        committed, brought = getattr(found, name), getattr(entry, name)
        if committed != brought:
            raise LedgerConflictError(
                f"step {entry.step} was committed with {name} {committed} under epoch "
                f"{found.epoch}; epoch {entry.epoch} now brings {brought}"
            )
    return found


def find_entry(store: ArtifactStore, step: int) -> LedgerEntry | None:
    found = store.find_json(ledger_key(step))
    return None if found is None else LedgerEntry.model_validate(found)


def read_entry(store: ArtifactStore, step: int) -> LedgerEntry:
    """A committed step. Raises FileNotFoundError."""
    return LedgerEntry.model_validate(store.get_json(ledger_key(step)))


def read_ledger(store: ArtifactStore) -> list[LedgerEntry]:
    """All committed steps, in order."""
    return [LedgerEntry.model_validate(store.get_json(key)) for key in store.keys(LEDGER)]


def as_rows(entries: list[LedgerEntry]) -> list[dict[str, Any]]:
    """The ledger as flat rows, for `pandas.DataFrame(as_rows(read_ledger(store)))`."""
    return [
        entry.model_dump(exclude={"metrics", "adam", "loss_config"})
        | {f"adam/{name}": value for name, value in entry.adam.model_dump().items()}
        | entry.metrics
        for entry in entries
    ]
