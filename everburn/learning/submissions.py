"""Submissions: what one `forward_backward` request is made of, and what it tells.

Owns the manifest, the datums of a request and the diagnostics of its result. Doesn't own which
groups are submitted together (the workflow) or the trainer session (trainers/).
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from everburn.learning.batch import segment_advantages
from everburn.learning.datums import Datum, group_datums
from everburn.learning.group import GroupManifest, load_group
from everburn.ledger import PreparedBatch
from everburn.refs import GroupKey, StoredRef, group_key, submission_key
from everburn.store import ArtifactStore


class SubmissionManifest(BaseModel):
    """One `forward_backward` request: which groups, in which order, with their digests."""

    model_config = ConfigDict(extra="forbid")

    step: int
    part: int
    epoch: int
    groups: list[StoredRef]


def prepare_submission(
    store: ArtifactStore,
    step: int,
    part: int,
    epoch: int,
    groups: Sequence[GroupKey],
    prepared: PreparedBatch | None = None,
) -> list[Datum]:
    """Record what a request consists of, before it is sent, and build its datums."""
    manifest = SubmissionManifest(
        step=step,
        part=part,
        epoch=epoch,
        groups=[store.ref(group_key(group)) for group in groups],
    )
    store.put_json(submission_key(step, part, epoch), manifest.model_dump(mode="json"))
    return recorded_datums(store, (load_group(store, group) for group in groups), prepared)


def recorded_datums(
    store: ArtifactStore, groups: Iterable[GroupManifest], prepared: PreparedBatch | None
) -> list[Datum]:
    """The datums of groups, with the advantages that the step's record names."""
    own = None if prepared is None else segment_advantages(store, prepared.advantages)
    return group_datums(store, groups, own)


def ratio_diagnostics(
    datums: Sequence[Datum],
    logprobs: Sequence[Sequence[float]],
    clip: Mapping[str, float | str | bool],
) -> dict[str, float]:
    """How far the trainer's policy is from the one that sampled, summed over trained tokens.

    logprobs: the trainer's, per datum and target. With d = trainer - rollout logprob: the sums of
    d and of exp(d), and how many ratios exp(d) lie outside the clip thresholds.
    """
    low = float(clip.get("clip_low_threshold", 0.0))
    high = float(clip.get("clip_high_threshold", math.inf))
    log_ratio_sum = ratio_sum = 0.0
    clipped = 0
    for datum, own in zip(datums, logprobs, strict=True):
        trained = datum.mask > 0
        d = np.asarray(own, dtype=np.float64)[trained] - datum.logprobs[trained]
        ratio = np.exp(d)
        log_ratio_sum += float(d.sum())
        ratio_sum += float(ratio.sum())
        clipped += int(((ratio < low) | (ratio > high)).sum())
    return {"log_ratio_sum": log_ratio_sum, "ratio_sum": ratio_sum, "clipped": clipped}
