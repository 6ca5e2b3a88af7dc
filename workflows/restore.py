"""A run's state after its end, rebuilt from its folder.

Owns what the folder says of a run without a workflow: which steps are committed, which rows are
resolved, which groups are complete and untrained. Doesn't own whether the run has ended
(workers/cli/resume.py), or how it continues (run/train_run.py).
"""

import json
from collections.abc import Container
from dataclasses import dataclass

from everburn.config import RunConfig
from everburn.learning.group import completed_groups, load_group
from everburn.records import metrics
from everburn.records.checkpoints import eligible_checkpoints, find_checkpoint
from everburn.records.ids import GroupResult, RunRef
from everburn.records.keys import ROWS_KEY
from everburn.records.ledger import LedgerEntry, read_ledger
from everburn.records.publications import publishing_leases
from everburn.records.run_folder import commanded_changes, find_origin, run_owner, stored_config
from everburn.records.store import ArtifactStore
from everburn.rollouts.dataset import stored_rows
from workflows.run.state import CheckpointAt, RunState


class RestoreError(ValueError):
    """A run can't continue from its folder, or not from the named checkpoint."""


def rebuilt_state(
    run: RunRef, config: RunConfig, now: float, checkpoint: str | None = None
) -> RunState:
    """The state from which a run continues: after its last committed step.

    checkpoint: the name or path of the one to load first; the ledger's steps since are replayed.

    Raises:
        RestoreError: the run has no checkpoint, or not that one.
    """
    store = ArtifactStore.of(run)
    ledger = read_ledger(store)
    if not store.exists(ROWS_KEY) or find_checkpoint(store, 0) is None:
        raise RestoreError(
            f"run {run.id} never began to train: there is nothing to resume; start it again"
        )
    state = RunState.initial(run, config, now)
    state.origin = find_origin(store)
    state.incarnation = run_owner(store).incarnation + 1
    # Number 0 is taken: how this incarnation begins, with what its configuration changes.
    state.recorder.next_command = 1
    state.step.committed = state.producer.admission.version = len(ledger)
    saved = saved_states(store, ledger)
    for eligible in saved if checkpoint is None else states_until(saved, checkpoint, run):
        state.checkpoints.remember(eligible.step, eligible.path)
    state.checkpoints.last = state.checkpoints.eligible[-1].path
    state.producer.cursor.total = len(stored_rows(run, ROWS_KEY)) * config.epochs
    _restore_rows(state, config, store, ledger)
    state.lease.lease_epoch = _last_lease_epoch(store, ledger)
    note_taken_over(state, run, config)
    records = metrics.read(store)
    state.recorder.producer_index = sum(r.stream == metrics.PRODUCER_STREAM for r in records)
    return state


def note_taken_over(
    state: RunState, run: RunRef, config: RunConfig, step: int | None = None
) -> None:
    """Note the changes by commands, before `step`, that `config` takes over."""
    values = config.model_dump(mode="json")
    started = stored_config(run).model_dump(mode="json")
    taken = {
        name: value
        for name, value in commanded_changes(run, step).items()
        if values[name] == value != started[name]
    }
    if taken:
        listed = ", ".join(f"{name}={json.dumps(value)}" for name, value in sorted(taken.items()))
        state.note(f"continues with the changes that run {run.id} received: {listed}")


def saved_states(store: ArtifactStore, ledger: list[LedgerEntry]) -> list[CheckpointAt]:
    return [
        CheckpointAt(step=found.step, path=found.path)
        for found in eligible_checkpoints(store, ledger)
    ]


def states_until(checkpoints: list[CheckpointAt], wanted: str, run: RunRef) -> list[CheckpointAt]:
    """The checkpoints up to the wanted one, which is loaded first.

    Raises:
        RestoreError: the run has no such checkpoint.
    """
    for count, checkpoint in enumerate(checkpoints, start=1):
        if wanted in (checkpoint.path, checkpoint.path.rpartition("/")[2]):
            return checkpoints[:count]
    names = ", ".join(checkpoint.path.rpartition("/")[2] for checkpoint in checkpoints) or "none"
    raise RestoreError(
        f"run {run.id} has no checkpoint {wanted!r}: it has {names}. Another run's state is "
        "where a new run starts: give its full path as init_from_checkpoint in the new run's file"
    )


def _last_lease_epoch(store: ArtifactStore, ledger: list[LedgerEntry]) -> int:
    """The highest that the run's folder knows. Of later leases nothing is left there: the
    incarnation tells them from those that take their numbers."""
    leases = [entry.lease_key for entry in ledger] + publishing_leases(store)
    first = find_checkpoint(store, 0)
    if first is not None:
        leases.append(first.lease_key)
    return max((lease.lease_epoch for lease in leases), default=0)


def _restore_rows(
    state: RunState, config: RunConfig, store: ArtifactStore, ledger: list[LedgerEntry]
) -> None:
    """Every issued row is trained, rejected, complete and untrained, or issued again."""
    trained = {group.cursor for entry in ledger for group in entry.groups}
    untrained = _untrained_rows(store, trained)
    producer, cursor = state.producer, state.producer.cursor
    cursor.next = max([*trained, *untrained], default=-1) + 1
    for number in range(cursor.next):
        row = untrained.get(number, _Row())
        if number in trained or row.rejected:
            cursor.resolve(number)
        elif row.accepted is not None:
            producer.queue.accept(row.accepted)
        else:
            cursor.give_back(number)
    # As if every committed step had taken a full batch: admission counts from there.
    waiting = len(producer.queue.groups) * config.completions_per_prompt
    producer.admission.accepted = len(ledger) * config.batch_samples + waiting


@dataclass(slots=True)
class _Row:
    """What a row's groups amount to, without their manifests: a long run has gigabytes of those."""

    rejected: bool = False
    accepted: GroupResult | None = None


def _untrained_rows(store: ArtifactStore, trained: Container[int]) -> dict[int, _Row]:
    """Untrained rows that have complete groups."""
    rows: dict[int, _Row] = {}
    for key in completed_groups(store):
        if key.cursor in trained:
            continue
        row, group = rows.setdefault(key.cursor, _Row()), load_group(store, key)
        row.rejected = row.rejected or group.rejected
        if row.accepted is None and group.outcome == "accepted":
            row.accepted = group.result
    return rows
