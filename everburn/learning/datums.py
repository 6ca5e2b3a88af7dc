"""Datums: the trainer-ready arrays of a group's segments.

Owns the shift by one token, the masks and which segments are left out. Doesn't own the SDK's
types (trainers/) or advantages (advantages.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from everburn.learning.group import GroupManifest
from everburn.learning.rollout_file import read_rollout
from everburn.rollouts import RolloutSample
from everburn.store import ArtifactStore


@dataclass(frozen=True, slots=True)
class Datum:
    """One segment of n tokens as n-1 predictions; all arrays have length n-1.

    inputs: int64, tokens[:-1]. targets: int64, tokens[1:].
    logprobs, advantages: float32, of the target; 0 where `mask` is 0.
    mask: float32, 1 where the target is trained.
    """

    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    mask: npt.NDArray[np.float32]

    @property
    def trained_tokens(self) -> int:
        return int(self.mask.sum())


def build_datum(segment: RolloutSample, advantage: float) -> Datum:
    """Position i predicts token i+1; the completion's advantage goes to its trained tokens."""
    tokens = np.asarray(segment.tokens, dtype=np.int64)
    mask = np.asarray(segment.loss_mask, dtype=np.float32)[1:]
    logprobs = np.asarray(segment.logprobs, dtype=np.float32)[1:]
    return Datum(
        inputs=tokens[:-1],
        targets=tokens[1:],
        logprobs=logprobs * mask,
        advantages=(mask * np.float32(advantage)).astype(np.float32),
        mask=mask,
    )


def group_datums(store: ArtifactStore, manifests: Iterable[GroupManifest]) -> list[Datum]:
    """The datums of several groups, in the order of groups, completions and segments.

    Completions with zero advantage are left out: they train nothing, and their tokens must not
    count in the normaliser.
    """
    return [
        build_datum(segment, member.advantage)
        for manifest in manifests
        for member in manifest.members
        if member.advantage
        for segment in read_rollout(store, member.stored)[1].segments
    ]
