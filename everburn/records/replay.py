"""Replay: applying a committed step again, as the ledger recorded it.

Owns the re-execution of recorded groups, submissions, order and hyper-parameters on a trainer
session, for both recovery and `everburn verify`. Doesn't own which steps are replayed.
"""

import asyncio

from everburn.learning.datums import Datum
from everburn.learning.group import GroupManifest
from everburn.learning.submissions import SubmissionManifest, recorded_datums
from everburn.records.ids import StoredRef
from everburn.records.ledger import LedgerEntry, PreparedBatch
from everburn.records.store import ArtifactStore, through_outages
from everburn.trainers.guards import require_finite_gradients, require_finite_metrics
from everburn.trainers.protocol import Trainer


async def replay_step(store: ArtifactStore, trainer: Trainer, entry: LedgerEntry) -> None:
    """Apply the step to a session that holds the state after its predecessor.

    Raises:
        CorruptArtifactError: a recorded file has changed.
        StoreError, TrainerStateLostError, TrainerRejectedError
    """
    pending = []
    for ref in entry.submissions:
        datums = await through_outages(_datums, store, ref, entry.prepared)
        pending.append(trainer.forward_backward(datums, entry.loss, entry.loss_config))
    for gradients in await asyncio.gather(*pending):
        require_finite_gradients(gradients)
    if entry.updated:
        require_finite_metrics("optim_step", await trainer.optim_step(entry.adam))


def _datums(
    store: ArtifactStore, submission: StoredRef, prepared: PreparedBatch | None
) -> list[Datum]:
    manifest = SubmissionManifest.model_validate(store.get_json(submission))
    groups = (GroupManifest.model_validate(store.get_json(ref)) for ref in manifest.groups)
    return recorded_datums(store, groups, prepared)
