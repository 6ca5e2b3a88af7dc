"""The ledger: one record per committed optimizer step, append-only.

Owns the record and its commit: atomic, idempotent, never changed afterwards. Doesn't own the
metrics streams (metrics.py) or what the run was told (commands.py), although a record keeps those
of its step.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from everburn.config import Entrypoint
from everburn.learning.losses import LossConfig
from everburn.records.commands import Command
from everburn.records.ids import (
    GroupKey,
    Leased,
    Ref,
    RewardSum,
    RunRef,
    StoredRef,
)
from everburn.records.keys import LEDGER, ledger_key
from everburn.records.metrics import Number, Record
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
    how many datums (segments) have one other than zero."""

    advantages: StoredRef
    groups: list[GroupKey]
    datums: int


class StepRecord(Leased):
    """What the run knows of a finished step, and the ledger keeps of it.

    version: published by this step. attempts: leases under which the step was begun. groups: the
        batch. prepared: where advantages are `prepare_batch`'s and not those of the manifests.
        snapshot: of the version; the previous one's when `updated` is false. seconds: since the
        previous publication. metrics: timings, and what trainer and scheduler reported.
    """

    step: int
    version: int
    attempts: int
    updated: bool
    groups: list[GroupKey]
    prepared: PreparedBatch | None = None
    adam: AdamParams
    snapshot: str
    checkpoint: str | None = None
    seconds: float
    metrics: dict[str, Number]


class StepCommit(StepRecord):
    """A finished step on its way into the ledger, with all that the store doesn't hold yet.

    submission_count: of this step. command_range: the numbers, start and stop, of the commands
        since the previous commit. rejected: completions of rows rejected since then, which count
        in raw metrics. save_seconds: by step, of checkpoints of earlier steps that were saved since
        then. producer: records of the producer stream.
    """

    run: RunRef
    submission_count: int
    command_range: tuple[int, int]
    rejected: RewardSum
    save_seconds: dict[int, float] = Field(default_factory=dict)
    producer: list[Record] = Field(default_factory=list)


class LedgerEntry(StepRecord):
    """Everything that optimizer step `step` was made of.

    digests: of each group's manifest, which names its rollouts with theirs. submissions: manifests
        in the order in which their gradients were added up. commands: since the previous step.
        changes: what these changed of the configuration.
    """

    digests: list[str]
    submissions: list[StoredRef]
    loss: str | Entrypoint
    loss_config: LossConfig
    changes: dict[str, JsonValue] = Field(default_factory=dict)
    commands: list[Command] = Field(default_factory=list)


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
    committed, repeated = found.model_dump(mode="json"), entry.model_dump(mode="json")
    for name in MADE_OF:
        if committed[name] != repeated[name]:
            raise LedgerConflictError(
                f"step {entry.step} was committed with {name} {committed[name]} under lease "
                f"{found.lease_key.text}; lease {entry.lease_key.text} now brings {repeated[name]}"
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
