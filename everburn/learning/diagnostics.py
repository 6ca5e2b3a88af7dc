"""Distance between the trained policy and the sampling policy, over a step's trained tokens.

Owns the sums over one request and the step's metrics, before the step's update. Light: workflows
import it.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from everburn.learning.losses import Clip

if TYPE_CHECKING:
    from everburn.learning.datums import Datum

LOG_RATIO_CAP = 20.0
"""Log ratios are clamped to +-20, so that their exp() stays finite."""


class PolicyDistance(BaseModel):
    """Sums over one request. tokens: its trained tokens.

    log_ratio, ratio: sums of d and exp(d), with d = trainer - rollout logprob. clipped: tokens
    whose ratio is outside the loss's clip thresholds; None without thresholds. sequences: segments
    with raw inference logprobs. k1, k3: over those, the sums of the sequence means of e and of
    exp(e) - e - 1, with e = trainer - raw inference logprob.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = 0
    log_ratio: float = 0.0
    ratio: float = 0.0
    clipped: int | None = None
    sequences: int = 0
    k1: float = 0.0
    k3: float = 0.0


def policy_distance(
    datums: Sequence["Datum"], logprobs: Sequence[Sequence[float]], clip: Clip | None
) -> PolicyDistance:
    """logprobs: the trainer's, per datum and target."""
    import numpy as np

    tokens = sequences = clipped = 0
    log_ratios = ratios = k1 = k3 = 0.0
    for datum, values in zip(datums, logprobs, strict=True):
        trained = datum.mask > 0
        current = np.asarray(values, dtype=np.float64)[trained]
        d = np.clip(current - datum.logprobs[trained], -LOG_RATIO_CAP, LOG_RATIO_CAP)
        tokens += len(d)
        log_ratios += float(d.sum())
        ratios += float(np.exp(d).sum())
        if clip is not None:
            ratio = np.exp(np.full_like(d, d.mean()) if clip.of == "sequence" else d)
            clipped += int(((ratio < clip.low) | (ratio > clip.high)).sum())
        if datum.raw_logprobs is not None:
            e = np.clip(current - datum.raw_logprobs[trained], -LOG_RATIO_CAP, LOG_RATIO_CAP)
            sequences += 1
            k1 += float(e.mean())
            k3 += float((np.exp(e) - e - 1).mean())
    return PolicyDistance(
        tokens=tokens,
        log_ratio=log_ratios,
        ratio=ratios,
        clipped=None if clip is None else clipped,
        sequences=sequences,
        k1=k1,
        k3=k3,
    )


def distance_metrics(requests: Sequence[PolicyDistance]) -> dict[str, float]:
    """The step's metrics over all its requests; metrics that can't be computed are absent.

    train/ppo_kl: mean of -d, the k1 estimator of KL(rollout policy || trained policy) (Schulman,
    "Approximating KL divergence", 2020). train/ratio_mean: mean of exp(d). train/clip_frac: share
    of tokens outside the clip thresholds. train/inference_k1, train/inference_k3: means over
    sequences.
    """
    tokens = sum(request.tokens for request in requests)
    if not tokens:
        return {}
    values = {
        "train/ppo_kl": -math.fsum(request.log_ratio for request in requests) / tokens,
        "train/ratio_mean": math.fsum(request.ratio for request in requests) / tokens,
    }
    clipped = [request.clipped for request in requests if request.clipped is not None]
    if clipped:
        values["train/clip_frac"] = sum(clipped) / tokens
    sequences = sum(request.sequences for request in requests)
    if sequences:
        values["train/inference_k1"] = math.fsum(request.k1 for request in requests) / sequences
        values["train/inference_k3"] = math.fsum(request.k3 for request in requests) / sequences
    return values
