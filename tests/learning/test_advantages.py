"""Group advantages against an independent computation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everburn.config import Entrypoint
from everburn.learning.advantages import (
    ADVANTAGES,
    InvalidAdvantagesError,
    advantage_function,
    check_single_reward,
    group_zscore,
    leave_one_out,
    mean_only,
    sample_std,
)

REWARDS = st.lists(
    st.floats(min_value=-100, max_value=100, allow_nan=False, width=32), min_size=2, max_size=16
)


@given(REWARDS)
def test_they_are_zscores_with_the_sample_deviation(rewards: list[float]) -> None:
    values = np.asarray(rewards, dtype=np.float64)
    std = values.std(ddof=1)
    expected = np.zeros_like(values) if std < 1e-8 else (values - values.mean()) / std

    np.testing.assert_allclose(group_zscore(rewards), expected, rtol=1e-6, atol=1e-6)


@given(REWARDS)
def test_mean_only_leaves_the_deviation_out(rewards: list[float]) -> None:
    values = np.asarray(rewards, dtype=np.float64)
    expected = values - values.mean() if values.std(ddof=1) >= 1e-8 else values * 0

    np.testing.assert_allclose(mean_only(rewards), expected, rtol=1e-6, atol=1e-6)


@given(REWARDS)
def test_each_is_compared_with_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [
        reward - np.mean(rewards[:index] + rewards[index + 1 :])
        for index, reward in enumerate(rewards)
    ]
    if sample_std(rewards) >= 1e-8:
        np.testing.assert_allclose(leave_one_out(rewards), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize(
    "rewards", [[], [1.0], [0.5, 0.5, 0.5], [0.1, 0.1, 0.1], [1.0, 1.0 + 1e-9]]
)
def test_without_a_spread_there_is_nothing_to_learn(name: str, rewards: list[float]) -> None:
    assert advantage_function(name)(rewards) == [0.0] * len(rewards)


def own(name: str, **kwargs: float) -> Entrypoint:
    return Entrypoint(name=f"support.losses:{name}", kwargs=dict(kwargs))


def test_a_function_of_ones_own_gets_its_arguments() -> None:
    assert advantage_function(own("reward_itself", baseline=0.5))([1.0]) == [0.5]
    check_single_reward(own("reward_itself", baseline=1.0))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("too_few", r"returned \[1.0\] for 2 reward\(s\): one finite number for each is due"),
        ("no_list", r"returned None for 2 reward\(s\), not a list of numbers"),
    ],
)
def test_what_a_function_returns_is_checked(name: str, text: str) -> None:
    with pytest.raises(InvalidAdvantagesError, match=f"support.losses:{name} {text}"):
        advantage_function(own(name))([1.0, 0.0])


def test_a_function_that_is_not_defined_for_one_reward_is_found_out_at_once() -> None:
    with pytest.raises(InvalidAdvantagesError, match="gives a single reward no advantage"):
        check_single_reward(own("nothing"))


def test_one_of_eight() -> None:
    advantages = group_zscore([1.0] + [0.0] * 7)
    assert advantages[0] == pytest.approx(2.4748737)
    assert advantages[1] == pytest.approx(-0.3535534)
    assert sample_std([1.0] + [0.0] * 7) == pytest.approx(0.3535534)
