"""Agreement: whether a published snapshot serves what the trainer has.

Owns the probe after each publication: the trainer and a sampler of the snapshot score the same
recorded completion, and must agree. It costs one forward pass over one sequence and one request
for one token. Doesn't own what follows from a disagreement (the run fails) or the transport.
"""

import math
from collections.abc import Sequence

from everburn.learning.group import GroupManifest
from everburn.learning.rollout_file import read_rollout
from everburn.learning.submissions import SubmissionManifest
from everburn.records.keys import submission_key
from everburn.records.ledger import find_entry
from everburn.records.store import ArtifactStore
from everburn.trainers.protocol import PublicationMismatchError, Snapshot, Trainer

SCORED_TOKENS = 64
"""Tokens of the completion that are compared; its prompt is only read."""
LONGEST = 8192
"""Tokens of a sequence that is still cheap to score."""
BEFORE_ANY_COMPLETION = list(range(1, 9))
"""What the initial policy is asked to score: nothing has been sampled yet, and every vocabulary has
these."""


async def check_served(
    trainer: Trainer, snapshot: Snapshot, tokens: list[int], first: int, tolerance: float
) -> float:
    """The mean absolute difference of log-probabilities over tokens[first:], in nats.

    Raises:
        PublicationMismatchError: it is above the tolerance, or not a number.
        TrainerStateLostError: the snapshot isn't served.
    """
    own, served = await trainer.score_twice(snapshot, tokens)
    gap = mean_gap(own[first - 1 :], served[first - 1 :])
    if not gap <= tolerance:
        raise PublicationMismatchError(
            f"{snapshot.path} doesn't serve what was trained: over {len(tokens) - first} tokens of "
            f"a recorded completion its log-probabilities differ from the trainer's by {gap:.3g} "
            f"nats on average, more than publication_tolerance = {tolerance:g}. The sampler holds "
            "other weights (stale, or of another model), or computes very differently; if that is "
            "to be expected, only a fork can tolerate more: `everburn fork RUN --at-step K --set "
            "publication_tolerance=...`"
        )
    return gap


def recorded_completion(store: ArtifactStore, version: int, epoch: int) -> tuple[list[int], int]:
    """Tokens that the step of `version` has trained, and the index of the first to compare."""
    manifest = _first_submission(store, version, epoch)
    groups = [] if manifest is None else manifest.groups
    for ref in groups:
        group = GroupManifest.model_validate(store.get_json(ref))
        for member in group.members:
            segment = read_rollout(store, member.stored)[1].segments[0]
            first = list(segment.loss_mask).index(1)
            end = first + SCORED_TOKENS
            if first > 0 and end <= LONGEST:
                return [int(token) for token in segment.tokens[:end]], first
    return BEFORE_ANY_COMPLETION, 1


def _first_submission(store: ArtifactStore, version: int, epoch: int) -> SubmissionManifest | None:
    """Of a committed step by its ledger entry, else of the one that is being taken."""
    entry = find_entry(store, version)
    if entry is not None:
        found = store.find_json(entry.submissions[0].key) if entry.submissions else None
    else:
        found = store.find_json(submission_key(version, 0, epoch))
    return None if found is None else SubmissionManifest.model_validate(found)


def mean_gap(own: Sequence[float], served: Sequence[float]) -> float:
    """The mean absolute difference of log-probabilities, in nats."""
    gaps = [abs(a - b) for a, b in zip(own, served, strict=True)]
    return math.fsum(gaps) / len(gaps)
