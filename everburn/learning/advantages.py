"""Advantages within a prompt group.

Owns the formulas, their names in a configuration, and what a run's own function must return.
Doesn't own which completions survive (group.py) nor how advantages spread over tokens (datums.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everburn.config import Entrypoint
from everburn.usercode.entrypoints import call

MIN_STD = 1e-8
"""Below it all rewards count as equal: dividing by rounding noise would train on it."""

AdvantageFunction = Callable[[Sequence[float]], list[float]]
"""Rewards of a group's surviving completions, in order, to the advantage of each."""


class InvalidAdvantagesError(ValueError):
    """An advantage function returned what can't be trained on. Fatal: it would do so again."""


def group_zscore(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / sample standard deviation (n-1), per completion of one group.

    All zero with fewer than two completions, or when the deviation is below 1e-8.
    Source: the group-relative advantage of GRPO, Shao et al. 2024 (arXiv:2402.03300), eq. 4's A,
    with the unbiased deviation as in the Fireworks and HUD recipes.
    """
    if _equal(rewards):
        return [0.0] * len(rewards)
    mean, std = math.fsum(rewards) / len(rewards), sample_std(rewards)
    return [(reward - mean) / std for reward in rewards]


def mean_only(rewards: Sequence[float]) -> list[float]:
    """r - mean: without the deviation, which weighs up groups that are nearly all right or wrong.

    All zero where `group_zscore` is. Source: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783).
    """
    if _equal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r - mean of the other completions' rewards: a baseline that doesn't depend on r.

    All zero where `group_zscore` is. Source: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), eq. 8.
    """
    if _equal(rewards):
        return [0.0] * len(rewards)
    total, others = math.fsum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


ADVANTAGES: Mapping[str, AdvantageFunction] = {
    "group_zscore": group_zscore,
    "mean_only": mean_only,
    "leave_one_out": leave_one_out,
}


def advantage_function(choice: str | Entrypoint) -> AdvantageFunction:
    """The function that a configuration chooses; one of the run's own is checked as it is called.

    That raises InvalidAdvantagesError, EntrypointError and whatever the function itself raises.
    """
    return ADVANTAGES[choice] if isinstance(choice, str) else lambda rewards: _own(choice, rewards)


def check_single_reward(entrypoint: Entrypoint) -> None:
    """Try a run's own function on groups of one, which `completions_per_prompt` 1 makes.

    Raises:
        InvalidAdvantagesError: it gives a single reward no advantage, whatever it is.
        EntrypointError, and whatever the function raises.
    """
    if not any(_own(entrypoint, [reward])[0] for reward in (0.0, 1.0)):
        raise InvalidAdvantagesError(
            f"{entrypoint.name} gives a single reward no advantage, neither 0 nor 1, and "
            "completions_per_prompt is 1: nothing would ever be trained"
        )


def sample_std(values: Sequence[float]) -> float:
    """Sample standard deviation (n-1); 0 with fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _equal(rewards: Sequence[float]) -> bool:
    """Whether there is nothing to tell completions apart by."""
    return sample_std(rewards) < MIN_STD


def _own(entrypoint: Entrypoint, rewards: Sequence[float]) -> list[float]:
    result: Any = call(entrypoint, list(rewards))
    try:
        values = [float(value) for value in result]
    except (TypeError, ValueError):
        raise InvalidAdvantagesError(
            f"{entrypoint.name} returned {result!r} for {len(rewards)} reward(s), not a list of "
            "numbers"
        ) from None
    if len(values) != len(rewards) or not all(map(math.isfinite, values)):
        raise InvalidAdvantagesError(
            f"{entrypoint.name} returned {values} for {len(rewards)} reward(s): one finite number "
            "for each is due"
        )
    return values
