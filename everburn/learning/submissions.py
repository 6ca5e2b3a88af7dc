"""Submissions: the content of one `forward_backward` request.

Owns its manifest and its datums. Doesn't own the choice of its groups (workflows), the trainer
session (trainers/) or the interpretation of its result (diagnostics.py).
"""

from collections.abc import Iterable, Sequence

from everburn.learning.batch import segment_advantages
from everburn.learning.datums import Datum, group_datums
from everburn.learning.group import GroupManifest, load_group
from everburn.records.ids import GroupKey, Leased, LeaseKey, StoredRef
from everburn.records.keys import group_key, submission_key
from everburn.records.ledger import PreparedBatch
from everburn.records.store import ArtifactStore


class SubmissionManifest(Leased):
    """The groups of a submission in order, with their digests."""

    step: int
    submission: int
    groups: list[StoredRef]


def prepare_submission(
    store: ArtifactStore,
    step: int,
    submission: int,
    lease: LeaseKey,
    groups: Sequence[GroupKey],
    prepared: PreparedBatch | None = None,
) -> list[Datum]:
    """Record a submission's manifest, before it is sent, and build its datums."""
    manifest = SubmissionManifest(
        incarnation=lease.incarnation,
        lease_epoch=lease.lease_epoch,
        step=step,
        submission=submission,
        groups=[store.ref(group_key(group)) for group in groups],
    )
    store.put_json(submission_key(step, submission, lease), manifest.model_dump(mode="json"))
    return recorded_datums(store, (load_group(store, group) for group in groups), prepared)


def recorded_datums(
    store: ArtifactStore, groups: Iterable[GroupManifest], prepared: PreparedBatch | None
) -> list[Datum]:
    """The datums of groups, with the advantages of `prepared` if given."""
    own = None if prepared is None else segment_advantages(store, prepared.advantages)
    return group_datums(store, groups, own)
