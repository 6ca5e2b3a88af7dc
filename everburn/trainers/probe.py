"""The probe after each publication: does the sampler serve the trainer's weights?

The trainer and a sampler of the snapshot score the same recorded completion and must agree. Costs
one forward pass over one sequence and a sampling request for one token. Doesn't own the reaction to
a mismatch (the run fails) or the transport.
"""

import math
from collections.abc import Sequence

from everburn.learning.group import GroupManifest
from everburn.learning.rollout_file import read_rollout
from everburn.learning.submissions import SubmissionManifest
from everburn.records.ids import LeaseKey
from everburn.records.keys import submission_key
from everburn.records.ledger import find_entry
from everburn.records.store import ArtifactStore
from everburn.trainers.protocol import PublicationMismatchError, Snapshot, Trainer

SCORED_TOKENS = 64
"""Completion tokens that are compared."""
MAX_SEQUENCE = 8192
"""Longest sequence (tokens) that is cheap to score."""
INITIAL_PROBE = list(range(1, 9))
"""Token ids for the initial policy, which has no completions yet; each vocabulary has these."""


async def check_served(
    trainer: Trainer, snapshot: Snapshot, tokens: list[int], first: int, tolerance: float
) -> float:
    """The mean absolute difference of logprobs over tokens[first:], in nats.

    Raises:
        PublicationMismatchError: it exceeds the tolerance or is NaN.
        TrainerStateLostError: the snapshot isn't served.
    """
    trained, served = await trainer.score_twice(snapshot, tokens)
    gap = mean_gap(trained[first - 1 :], served[first - 1 :])
    if not gap <= tolerance:
        raise PublicationMismatchError(
            f"{snapshot.path} doesn't serve the trained weights: over {len(tokens) - first} tokens "
            f"of a recorded completion its logprobs differ from the trainer's by {gap:.3g} nats on "
            f"average, more than publication_tolerance = {tolerance:g}. The sampler has other "
            "weights (stale, or of another model) or other numerics; if the difference is "
            "expected, only a fork can tolerate more: `everburn fork RUN --at-step K --set "
            "publication_tolerance=...`"
        )
    return gap


def recorded_completion(
    store: ArtifactStore, version: int, lease: LeaseKey
) -> tuple[list[int], int]:
    """Tokens trained by the step of `version`, and the index of the first to compare."""
    manifest = _first_submission(store, version, lease)
    groups = [] if manifest is None else manifest.groups
    for ref in groups:
        group = GroupManifest.model_validate(store.get_json(ref))
        for member in group.members:
            segment = read_rollout(store, member.stored)[1].segments[0]
            first = list(segment.loss_mask).index(1)
            end = first + SCORED_TOKENS
            if first > 0 and end <= MAX_SEQUENCE:
                return [int(token) for token in segment.tokens[:end]], first
    return INITIAL_PROBE, 1


def _first_submission(
    store: ArtifactStore, version: int, lease: LeaseKey
) -> SubmissionManifest | None:
    """The first submission of a step, from its ledger entry if it is committed."""
    entry = find_entry(store, version)
    if entry is not None:
        manifest = store.find_json(entry.submissions[0].key) if entry.submissions else None
    else:
        manifest = store.find_json(submission_key(version, 0, lease))
    return None if manifest is None else SubmissionManifest.model_validate(manifest)


def mean_gap(trained: Sequence[float], served: Sequence[float]) -> float:
    """The mean absolute difference of logprobs, in nats."""
    gaps = [abs(a - b) for a, b in zip(trained, served, strict=True)]
    return math.fsum(gaps) / len(gaps)
