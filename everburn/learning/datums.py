"""Datums: trainer-ready arrays of segments.

Owns the shift by one token, the masks and the omission of segments. Doesn't own the SDK's types
(trainers/) or advantages (advantages.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from everburn.learning.batch import SegmentAdvantages, SegmentKey
from everburn.learning.group import GroupManifest
from everburn.learning.rollout_file import read_rollout
from everburn.records.store import ArtifactStore
from everburn.rollouts.contract import RolloutSample


@dataclass(frozen=True, slots=True)
class Datum:
    """One segment of n tokens as n-1 predictions; all fields have length n-1.

    inputs: tokens[:-1]. targets: tokens[1:]. mask: 1 where the target is trained. logprobs,
    advantages: of the target; 0 where `mask` is 0. raw_logprobs: without sampling settings.
    routing: expert routing per input position.
    """

    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    mask: npt.NDArray[np.float32]
    raw_logprobs: npt.NDArray[np.float32] | None = None
    routing: list[str] | None = None


def build_datum(segment: RolloutSample, advantage: float | Sequence[float]) -> Datum:
    """Position i predicts token i+1. advantage: one for all trained tokens, or one per token."""
    tokens = np.asarray(segment.tokens, dtype=np.int64)
    mask = np.asarray(segment.loss_mask, dtype=np.float32)[1:]
    logprobs = np.asarray(segment.logprobs, dtype=np.float32)[1:]
    raw = segment.raw_logprobs
    advantages = np.asarray(advantage, dtype=np.float32)
    return Datum(
        inputs=tokens[:-1],
        targets=tokens[1:],
        logprobs=logprobs * mask,
        advantages=mask * (advantages if advantages.ndim == 0 else advantages[1:]),
        mask=mask,
        raw_logprobs=None if raw is None else np.asarray(raw, dtype=np.float32)[1:],
        # Token i+1 was predicted with the routing of input position i.
        routing=None if segment.routing is None else list(segment.routing)[1:],
    )


def group_datums(
    store: ArtifactStore,
    manifests: Iterable[GroupManifest],
    prepared: SegmentAdvantages | None = None,
) -> list[Datum]:
    """The datums of groups, in order. prepared: replaces the groups' advantages. Segments whose
    advantages are all zero are omitted: their tokens must not count in the normalization."""
    datums = []
    for manifest in manifests:
        for member in manifest.members:
            if prepared is None and not member.advantage:
                continue
            segments = read_rollout(store, member.stored)[1].segments
            for index, segment in enumerate(segments):
                key = SegmentKey(manifest.key, member.completion, index)
                advantage = member.advantage if prepared is None else prepared[key]
                datum = build_datum(segment, advantage)
                if datum.advantages.any():
                    datums.append(datum)
    return datums
