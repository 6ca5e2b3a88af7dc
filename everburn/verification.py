"""Verification: a run against its own ledger.

Re-executes every committed step on a fresh trainer and compares weights, and checks that each row
has exactly one fate. Finds what a fault could have done: a step applied twice or not at all, a row
trained twice or skipped, a file changed. Doesn't own how a step is replayed (replay.py).
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from everburn.checkpoints import eligible_checkpoints
from everburn.learning.group import GroupManifest, all_groups
from everburn.learning.submissions import SubmissionManifest
from everburn.ledger import LedgerEntry, read_ledger
from everburn.refs import GroupKey, RunRef, StoredRef, group_key
from everburn.replay import replay_step
from everburn.run_folder import stored_config
from everburn.store import ArtifactStore
from everburn.trainers import Trainer


class VerificationError(Exception):
    """The first difference between a run and its ledger."""


@dataclass(frozen=True)
class Verified:
    """What was compared. `weights` names the checkpoint whose weights were equal."""

    steps: int
    rows_trained: int
    rows_rejected: int
    weights: str


def check_records(run: RunRef) -> tuple[int, int]:
    """Check the ledger by itself: contiguous steps, one fate per row, files as recorded.

    Returns the numbers of rows trained and rejected.

    Raises:
        VerificationError: naming the first difference.
    """
    store = ArtifactStore.of(run)
    trained: dict[int, int] = {}
    for number, entry in enumerate(read_ledger(store), start=1):
        if entry.step != number:
            raise VerificationError(
                f"step {number} is missing: the ledger goes on with {entry.step}"
            )
        for text in entry.groups:
            cursor = GroupKey.parse(text).cursor
            if cursor in trained:
                raise VerificationError(
                    f"row {cursor} was trained twice: in steps {trained[cursor]} and {number}"
                )
            trained[cursor] = number
        _check_files(store, entry)
    rejected = _rejected(store, set(trained))
    return len(trained), len(rejected)


async def verify(
    run: RunRef,
    open_trainer: Callable[[], Awaitable[Trainer]],
    weights_digest: Callable[[str], str],
    name: str,
) -> Verified:
    """Re-execute the run from state-0 to its last checkpoint, and compare weights.

    open_trainer: a session as the run's config asks for. weights_digest: of a checkpoint, by its
    reference. name: under which the result is saved at the service.

    Raises:
        VerificationError: naming the first difference.
    """
    trained, rejected = check_records(run)
    store = ArtifactStore.of(run)
    ledger = read_ledger(store)
    saved = eligible_checkpoints(store, ledger)
    if not saved or saved[0].step > 0:
        raise VerificationError(f"run {run.id} has no initial state: it never began to train")
    start, last = saved[0], saved[-1]
    trainer = await open_trainer()
    try:
        await trainer.load_checkpoint(start.path)
        compared = 0
        for checkpoint in saved[1:]:
            for entry in ledger[compared : checkpoint.step]:
                await replay_step(store, trainer, entry)
            compared = checkpoint.step
            again = await trainer.save_checkpoint(f"{name}-{checkpoint.step}")
            if weights_digest(again) != weights_digest(checkpoint.path):
                raise VerificationError(
                    f"weights after step {checkpoint.step} differ: {checkpoint.path} isn't what "
                    f"the ledger's steps lead to ({again})"
                )
    finally:
        await trainer.close()
    return Verified(compared, trained, rejected, last.path)


def row_count(run: RunRef) -> int:
    """Rows of the run over all epochs."""
    from everburn.dataset import stored_rows
    from everburn.refs import ROWS_KEY

    return len(stored_rows(run, ROWS_KEY)) * stored_config(run).epochs


def _check_files(store: ArtifactStore, entry: LedgerEntry) -> None:
    """Every file that the step was made of still has its digest, and belongs to its batch."""
    batch = set(entry.groups)
    for text, digest in zip(entry.groups, entry.digests, strict=True):
        store.get(StoredRef(key=group_key(GroupKey.parse(text)), sha256=digest))
    if entry.prepared is not None:
        store.get(entry.prepared.advantages)
    for ref in entry.submissions:
        manifest = SubmissionManifest.model_validate(store.get_json(ref))
        for group_ref in manifest.groups:
            group = GroupManifest.model_validate(store.get_json(group_ref))
            if group.key.text not in batch:
                raise VerificationError(
                    f"step {entry.step} submitted row {group.key.text}, which isn't in its batch"
                )
            for member in group.members:
                store.get(member.stored)


def _rejected(store: ArtifactStore, trained: set[int]) -> set[int]:
    rejected = (group.key.cursor for group in all_groups(store) if group.rejected)
    return set(rejected) - trained
