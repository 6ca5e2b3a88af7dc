"""Advantages within a prompt group.

Owns the formula. Doesn't own which completions survive (group.py) nor how advantages spread over
tokens (datums.py).
"""

import math
from collections.abc import Sequence

MIN_STD = 1e-8
"""Below it all rewards count as equal: dividing by rounding noise would train on it."""


def group_zscore(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / sample standard deviation (n-1), per completion of one group.

    All zero with fewer than two completions, or when the deviation is below 1e-8.
    Source: the group-relative advantage of GRPO, Shao et al. 2024 (arXiv:2402.03300), eq. 4's A,
    with the unbiased deviation as in the Fireworks and HUD recipes.
    """
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = sample_std(rewards)
    if std < MIN_STD:
        return [0.0] * len(rewards)
    return [(reward - mean) / std for reward in rewards]


def sample_std(values: Sequence[float]) -> float:
    """Sample standard deviation (n-1); 0 with fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
