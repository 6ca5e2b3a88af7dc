"""Verification of a run against its own ledger.

Replays every committed step on a new trainer and compares weights, and checks that each row has one
outcome and each group of a batch was applied once. Detects a step applied twice or not at all, a
row trained twice or skipped, and a changed file. Doesn't own the replay of a step (replay.py).
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from everburn.learning.group import GroupManifest
from everburn.learning.submissions import SubmissionManifest
from everburn.records.checkpoints import Checkpoint, eligible_checkpoints
from everburn.records.commands import Ending, ending_of
from everburn.records.ids import GroupKey, RunRef, StoredRef
from everburn.records.keys import GROUPS, LEDGER, ROWS_KEY, group_key
from everburn.records.ledger import LedgerEntry
from everburn.records.replay import replay_step
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore, CorruptArtifactError, StoreError
from everburn.trainers.protocol import Trainer

Model = TypeVar("Model", bound=BaseModel)
NAMED = 5
"""Rows that a message lists; the others are counted."""


class VerificationError(Exception):
    """The first difference between a run and its ledger, or an unreadable file."""


@dataclass(frozen=True)
class RowOutcomes:
    """Outcomes of the run's rows. ending: how the run ended; None if that isn't recorded."""

    trained: int
    rejected: int
    open: list[int]
    ending: Ending | None

    @property
    def open_rows(self) -> str:
        return _rows(self.open)


@dataclass(frozen=True)
class Verified:
    """The result. steps: replayed steps up to the last checkpoint (`weights`), with equal weights.
    uncompared: replayed steps after it, which have no checkpoint to compare with."""

    steps: int
    uncompared: int
    outcomes: RowOutcomes
    weights: str

    @property
    def rows_trained(self) -> int:
        return self.outcomes.trained

    @property
    def rows_rejected(self) -> int:
        return self.outcomes.rejected


def check_records(run: RunRef) -> RowOutcomes:
    """Check the ledger without a trainer: contiguous steps, at most one outcome per row (exactly
    one if the run completed), one submission per group, files as recorded.

    Raises:
        VerificationError: naming the first difference.
    """
    store = ArtifactStore.of(run)
    with _damage_named():
        trained: dict[int, int] = {}
        for entry in _ledger(store):
            for cursor in (group.cursor for group in entry.groups):
                if cursor in trained:
                    raise VerificationError(
                        f"row {cursor} was trained twice: in steps {trained[cursor]} and "
                        f"{entry.step}"
                    )
                trained[cursor] = entry.step
            _check_step(store, entry)
        rejected = _rejected(store, trained)
        return _outcomes(run, trained, rejected)


async def verify(
    run: RunRef,
    open_trainer: Callable[[], Awaitable[Trainer]],
    weights_digest: Callable[[str], str],
    name: str,
) -> Verified:
    """Replay the run from state-0 to its last step, and compare weights at each checkpoint.

    open_trainer: opens a session for the run's configuration. weights_digest: the digest of a
    checkpoint's weights. name: prefix of the checkpoints that this saves at the service.

    Raises:
        VerificationError: naming the first difference.
    """
    outcomes = check_records(run)
    store = ArtifactStore.of(run)
    with _damage_named():
        ledger = list(_ledger(store))
        saved = eligible_checkpoints(store, ledger)
    if not saved or saved[0].step > 0:
        raise VerificationError(f"run {run.id} has no initial state: it never began to train")
    at = {checkpoint.step: checkpoint for checkpoint in saved}
    trainer = await open_trainer()
    try:
        with _damage_named():
            await trainer.load_checkpoint(saved[0].path)
            for entry in ledger:
                await replay_step(store, trainer, entry)
                if entry.step in at:
                    again = await trainer.save_checkpoint(f"{name}-{entry.step}")
                    _compare(at[entry.step], again, weights_digest)
    finally:
        await trainer.close()
    last = saved[-1]
    return Verified(last.step, len(ledger) - last.step, outcomes, last.path)


def row_count(run: RunRef) -> int:
    """Rows of the run over all epochs."""
    from everburn.rollouts.dataset import stored_rows

    return len(stored_rows(run, ROWS_KEY)) * stored_config(run).epochs


def _compare(checkpoint: Checkpoint, again: str, weights_digest: Callable[[str], str]) -> None:
    if weights_digest(again) != weights_digest(checkpoint.path):
        raise VerificationError(
            f"weights after step {checkpoint.step} differ: {checkpoint.path} isn't what the "
            f"ledger's steps lead to ({again})"
        )


def _ledger(store: ArtifactStore) -> Iterator[LedgerEntry]:
    for number, key in enumerate(store.keys(LEDGER), start=1):
        entry = _read(store, key, LedgerEntry)
        if len(entry.groups) != len(entry.digests):
            raise VerificationError(
                f"{store.path(key)} is damaged: it has {len(entry.groups)} groups and "
                f"{len(entry.digests)} digests"
            )
        if entry.step != number:
            raise VerificationError(
                f"step {number} is missing: the ledger continues with {entry.step}"
            )
        if entry.version != number:
            raise VerificationError(f"step {number} published version {entry.version}")
        yield entry


def _check_step(store: ArtifactStore, entry: LedgerEntry) -> None:
    """Check the digests of all files of the step, and that each group of its batch with a training
    signal was submitted once."""
    digests = dict(zip(entry.groups, entry.digests, strict=True))
    batch = {
        key: _read(store, StoredRef(key=group_key(key), sha256=digest), GroupManifest)
        for key, digest in digests.items()
    }
    if entry.prepared is None:
        taught = {key for key, group in batch.items() if group.datums}
    else:
        store.get(entry.prepared.advantages)
        taught = set(entry.prepared.groups)
    submitted: Counter[GroupKey] = Counter()
    for submission in entry.submissions:
        for ref in _read(store, submission, SubmissionManifest).groups:
            key = _read(store, ref, GroupManifest).key
            if ref.sha256 != digests.get(key):
                raise VerificationError(
                    f"step {entry.step} submitted row {key.text}, which isn't in its batch"
                )
            submitted[key] += 1
    for key in batch:
        if submitted[key] != (key in taught):
            raise VerificationError(
                f"step {entry.step} submitted row {key.text} {submitted[key]} times, and "
                f"{'once' if key in taught else 'not at all'} is right"
            )
    if entry.updated != bool(taught):
        raise VerificationError(
            f"step {entry.step} {'changed' if entry.updated else 'did not change'} weights, and "
            f"{len(taught)} of its groups have a training signal"
        )


def _rejected(store: ArtifactStore, trained: dict[int, int]) -> set[int]:
    """The rejected rows. Checks that each was rejected once and not trained, and the files of all
    rollouts."""
    rejected: dict[int, str] = {}
    for key in store.keys(GROUPS):
        group = _read(store, key, GroupManifest)
        for member in group.members:
            store.get(member.stored)
        if not group.rejected:
            continue
        cursor = group.key.cursor
        if cursor in trained:
            raise VerificationError(
                f"row {cursor} was rejected, in {store.path(key)}, and trained, in step "
                f"{trained[cursor]}"
            )
        if cursor in rejected:
            raise VerificationError(
                f"row {cursor} was rejected twice: in {store.path(rejected[cursor])} and "
                f"{store.path(key)}"
            )
        rejected[cursor] = key
    return set(rejected)


def _outcomes(run: RunRef, trained: dict[int, int], rejected: set[int]) -> RowOutcomes:
    store = ArtifactStore.of(run)
    ending = ending_of(store)
    resolved = trained.keys() | rejected
    if not store.exists(ROWS_KEY):
        if resolved:
            raise VerificationError(f"{store.path(ROWS_KEY)} is missing")
        return RowOutcomes(0, 0, [], ending)
    try:
        total = row_count(run)
    except (CorruptArtifactError, ValueError) as error:
        raise VerificationError(f"{store.path(ROWS_KEY)} is damaged: {error}") from None
    unknown = sorted(resolved - set(range(total)))
    if unknown:
        raise VerificationError(f"{_rows(unknown)}: the run has {total} rows, numbered from 0")
    missing = sorted(set(range(total)) - resolved)
    if missing and ending == "completed":
        raise VerificationError(
            f"the run completed, and {_rows(missing)} has neither been trained nor rejected"
        )
    return RowOutcomes(len(trained), len(rejected), missing, ending)


def _rows(rows: list[int]) -> str:
    listed = ", ".join(str(row) for row in rows[:NAMED])
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return f"row{'s' if len(rows) > 1 else ''} {listed}{more}"


def _read(store: ArtifactStore, ref: str | StoredRef, model: type[Model]) -> Model:
    """Read a file. Raises VerificationError if it is invalid."""
    try:
        return model.model_validate(store.get_json(ref))
    except ValidationError as error:
        path = store.path(ref if isinstance(ref, str) else ref.key)
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise VerificationError(f"{path} is damaged: {where}: {first['msg']}") from None


@contextmanager
def _damage_named() -> Iterator[None]:
    """Report missing, changed and unreadable files as VerificationError."""
    try:
        yield
    except (StoreError, FileNotFoundError) as error:
        raise VerificationError(str(error)) from None
