"""Advantages within a prompt group.

Owns the formulas, their names, and the check of user functions. Doesn't own which completions
survive (group.py) or advantages per token (datums.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everburn.config import Entrypoint
from everburn.usercode.entrypoints import call

MIN_STD = 1e-8
"""Rewards with a smaller deviation count as equal: dividing by it would amplify rounding noise."""

AdvantageFunction = Callable[[Sequence[float]], list[float]]
"""Rewards of a group's surviving completions to their advantages, in the same order."""


class InvalidAdvantagesError(ValueError):
    """An advantage function returned an invalid result. Fatal: a retry would return the same."""


def group_zscore(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / sample standard deviation (n-1), per completion of one group.

    All zero with fewer than two completions or a deviation below 1e-8. Source: GRPO, Shao et al.
    2024 (arXiv:2402.03300), A in eq. 4, with the unbiased deviation of the Fireworks and HUD
    recipes.
    """
    if _are_equal(rewards):
        return [0.0] * len(rewards)
    mean, std = math.fsum(rewards) / len(rewards), sample_std(rewards)
    return [(reward - mean) / std for reward in rewards]


def mean_only(rewards: Sequence[float]) -> list[float]:
    """r - mean: division by the deviation would favor groups that are nearly all right or wrong.

    All zero if `group_zscore` is. Source: Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783).
    """
    if _are_equal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r - mean of the other completions' rewards, a baseline independent of r.

    All zero if `group_zscore` is. Source: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), eq. 8.
    """
    if _are_equal(rewards):
        return [0.0] * len(rewards)
    total, others = math.fsum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


ADVANTAGES: Mapping[str, AdvantageFunction] = {
    "group_zscore": group_zscore,
    "mean_only": mean_only,
    "leave_one_out": leave_one_out,
}


def advantage_function(choice: str | Entrypoint) -> AdvantageFunction:
    """The configured function. A user function is checked at each call, which may raise
    InvalidAdvantagesError, EntrypointError and its own errors."""
    if isinstance(choice, str):
        return ADVANTAGES[choice]
    return lambda rewards: _call_user_function(choice, rewards)


def check_single_reward(entrypoint: Entrypoint) -> None:
    """Try a user function on groups of one. Raises InvalidAdvantagesError if their advantage is
    zero, and the errors of `advantage_function`."""
    if not any(_call_user_function(entrypoint, [reward])[0] for reward in (0.0, 1.0)):
        raise InvalidAdvantagesError(
            f"{entrypoint.name} gives a single reward no advantage (tried 0 and 1), and "
            "completions_per_prompt is 1: the run would never train"
        )


def sample_std(values: Sequence[float]) -> float:
    """Sample standard deviation (n-1); 0 with fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _are_equal(rewards: Sequence[float]) -> bool:
    return sample_std(rewards) < MIN_STD


def _call_user_function(entrypoint: Entrypoint, rewards: Sequence[float]) -> list[float]:
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
            f"{entrypoint.name} returned {values} for {len(rewards)} reward(s); it must return one "
            "finite number for each"
        )
    return values
