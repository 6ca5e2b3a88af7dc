"""The ledger: one record per committed optimizer step, append-only.

Owns the record and its commit: atomic, idempotent, immutable. Doesn't own the metrics streams
(metrics.py) or the commands (commands.py), although a record repeats those of its step.
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
    """Two different records claim the same step: a writer was not fenced."""


class AdamParams(BaseModel):
    """Hyperparameters of one optimizer step, as sent to the trainer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    normalization: str


class PreparedBatch(Ref):
    """The result of `prepare_batch` for a step: the file of its advantages, and which groups and
    how many datums (segments) have a nonzero one."""

    advantages: StoredRef
    groups: list[GroupKey]
    datums: int


class StepRecord(Leased):
    """The part of a finished step's ledger entry that the run knows.

    version: published by this step. attempts: leases under which the step was started. groups: the
        batch. prepared: advantages of `prepare_batch`, which replace those of the manifests.
        snapshot: the version's, or the previous one's if `updated` is false. seconds: since the
        previous publication. metrics: timings, and reports of trainer and scheduler.
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
    """A finished step to be committed, with everything that isn't in the store yet.

    submission_count: submissions of this step. command_range: start and stop number of the commands
        since the previous commit. rejected: completions of rows rejected since then, which count in
        raw metrics. save_seconds: save times, by step, of earlier checkpoints saved since then.
        producer: records of the producer stream.
    """

    run: RunRef
    submission_count: int
    command_range: tuple[int, int]
    rejected: RewardSum
    save_seconds: dict[int, float] = Field(default_factory=dict)
    producer: list[Record] = Field(default_factory=list)


class LedgerEntry(StepRecord):
    """All inputs of optimizer step `step`.

    digests: one per group, of its manifest, which has those of its rollouts. submissions: manifests
        in the order in which their gradients were accumulated. commands: since the previous step.
        changes: configuration changes made by these commands.
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
"""Fields that must be equal when a step is committed again."""


def commit(store: ArtifactStore, entry: LedgerEntry) -> LedgerEntry:
    """Append a step. Committing the same step again returns what was committed first.

    Raises:
        LedgerConflictError: the step was committed with other values, or its predecessor is
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
