"""A run's state after its end, rebuilt from its folder.

Owns what the folder says of a run that no workflow remembers any more: which steps are committed,
which rows are resolved, which groups are complete and untrained. Doesn't own whether it has ended,
so that it can be resumed (workers/cli/resume.py), or how it goes on from there (run/train_run.py).
"""

import json
from collections.abc import Container
from dataclasses import dataclass

from everburn.config import RunConfig
from everburn.learning.group import GroupManifest, completed_groups, load_group
from everburn.records import metrics
from everburn.records.checkpoints import eligible_checkpoints, find_checkpoint
from everburn.records.ids import NUMBERS_PER_LIFE, GroupKey, RunRef
from everburn.records.keys import ROWS_KEY
from everburn.records.ledger import LedgerEntry, read_ledger
from everburn.records.publications import current_publication
from everburn.records.run_folder import find_origin, run_owner, stored_config, told_changes
from everburn.records.store import ArtifactStore
from everburn.rollouts.dataset import stored_rows
from everburn.scheduling.queue import QueuedGroup
from workflows.run.recovery import remember
from workflows.run.state import CheckpointAt, RunState


class RestoreError(ValueError):
    """A run can't go on from its folder, or not from the checkpoint that was named."""


def rebuilt_state(
    run: RunRef, config: RunConfig, now: float, checkpoint: str | None = None
) -> RunState:
    """The state from which a run goes on: after its last committed step.

    checkpoint: the name or path of the one to load first; the ledger's steps since are replayed.

    Raises:
        RestoreError: the run saved no state that it could go on from, or not that one.
    """
    store = ArtifactStore.of(run)
    ledger = read_ledger(store)
    if not store.exists(ROWS_KEY) or find_checkpoint(store, 0) is None:
        raise RestoreError(
            f"run {run.id} never began to train: there is nothing to resume; start it anew"
        )
    state = RunState.initial(run, config, now)
    state.origin = find_origin(store)
    state.life = run_owner(store).life + 1
    # The first is how this life begins: what its configuration changes.
    state.told = 1
    state.step = len(ledger)
    state.admission.version = len(ledger)
    checkpoints = saved_states(store, ledger)
    for eligible in (
        checkpoints if checkpoint is None else states_until(checkpoints, checkpoint, run)
    ):
        remember(state, eligible)
    state.checkpoint = state.checkpoints[-1].path
    state.cursor.total = len(stored_rows(run, ROWS_KEY)) * config.epochs
    _restore_rows(state, config, store, ledger)
    published = current_publication(store)
    last_epoch = published.epoch if published is not None else 0
    state.epoch = max(last_epoch, state.life * NUMBERS_PER_LIFE, *(entry.epoch for entry in ledger))
    note_taken_over(state, run, config)
    state.producer_index = sum(r.stream == metrics.PRODUCER_STREAM for r in metrics.read(store))
    return state


def note_taken_over(
    state: RunState, run: RunRef, config: RunConfig, step: int | None = None
) -> None:
    """Say what `config` has of what a run was told since it was started, before `step`."""
    values = config.model_dump(mode="json")
    started = stored_config(run).model_dump(mode="json")
    told = {
        name: value
        for name, value in told_changes(run, step).items()
        if values[name] == value != started[name]
    }
    if told:
        listed = ", ".join(f"{name}={json.dumps(value)}" for name, value in sorted(told.items()))
        state.note(f"goes on with what run {run.id} was told since it was started: {listed}")


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


def _restore_rows(
    state: RunState, config: RunConfig, store: ArtifactStore, ledger: list[LedgerEntry]
) -> None:
    """Every row that was begun is trained, rejected, complete and untrained, or begun again."""
    trained = {GroupKey.parse(text).cursor for entry in ledger for text in entry.groups}
    untrained = _untrained_rows(store, trained)
    cursor = state.cursor
    cursor.next = max([*trained, *untrained], default=-1) + 1
    state.first_attempt = state.life * NUMBERS_PER_LIFE
    for number in range(cursor.next):
        row = untrained.get(number, _Row())
        if number in trained or row.rejected:
            cursor.resolve(number)
        elif row.accepted is not None:
            state.queue.accept(row.accepted)
        else:
            cursor.give_back(number)
    # As if every committed step had taken a full batch: admission counts from there.
    waiting = len(state.queue.groups) * config.completions_per_prompt
    state.admission.accepted = len(ledger) * config.batch_samples + waiting


@dataclass(slots=True)
class _Row:
    """What became of a row's groups: not their manifests, of which a long run has gigabytes."""

    rejected: bool = False
    accepted: QueuedGroup | None = None


def _untrained_rows(store: ArtifactStore, trained: Container[int]) -> dict[int, _Row]:
    """The rows of which groups are complete, but for those that were trained."""
    rows: dict[int, _Row] = {}
    for key in completed_groups(store):
        if key.cursor in trained:
            continue
        row, group = rows.setdefault(key.cursor, _Row()), load_group(store, key)
        row.rejected = row.rejected or group.rejected
        if row.accepted is None and group.fate == "accepted":
            row.accepted = _queued(group)
    return rows


def _queued(group: GroupManifest) -> QueuedGroup:
    return QueuedGroup(
        c=group.key.cursor,
        a=group.key.attempt,
        v=group.version,
        n=len(group.members),
        d=group.datums,
    )
