"""Group advantages, against an independent computation."""

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
def test_group_zscore_uses_the_sample_deviation(rewards: list[float]) -> None:
    values = np.asarray(rewards, dtype=np.float64)
    std = values.std(ddof=1)
    expected = np.zeros_like(values) if std < 1e-8 else (values - values.mean()) / std

    np.testing.assert_allclose(group_zscore(rewards), expected, rtol=1e-6, atol=1e-6)


@given(REWARDS)
def test_mean_only_does_not_divide_by_the_deviation(rewards: list[float]) -> None:
    values = np.asarray(rewards, dtype=np.float64)
    expected = values - values.mean() if values.std(ddof=1) >= 1e-8 else values * 0

    np.testing.assert_allclose(mean_only(rewards), expected, rtol=1e-6, atol=1e-6)


@given(REWARDS)
def test_leave_one_out_compares_with_the_mean_of_the_others(rewards: list[float]) -> None:
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
def test_equal_rewards_have_no_advantage(name: str, rewards: list[float]) -> None:
    assert advantage_function(name)(rewards) == [0.0] * len(rewards)


def user_function(name: str, **kwargs: float) -> Entrypoint:
    return Entrypoint(name=f"support.losses:{name}", kwargs=dict(kwargs))


def test_a_user_function_gets_its_arguments() -> None:
    assert advantage_function(user_function("reward_itself", baseline=0.5))([1.0]) == [0.5]
    check_single_reward(user_function("reward_itself", baseline=1.0))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("too_few", r"returned \[1.0\] for 2 reward\(s\); it must return one finite number"),
        ("no_list", r"returned None for 2 reward\(s\), not a list of numbers"),
    ],
)
def test_the_result_of_a_user_function_is_checked(name: str, text: str) -> None:
    with pytest.raises(InvalidAdvantagesError, match=f"support.losses:{name} {text}"):
        advantage_function(user_function(name))([1.0, 0.0])


def test_a_function_that_ignores_single_rewards_is_refused() -> None:
    with pytest.raises(InvalidAdvantagesError, match="gives a single reward no advantage"):
        check_single_reward(user_function("nothing"))


def test_group_zscore_of_one_success_in_eight() -> None:
    advantages = group_zscore([1.0] + [0.0] * 7)
    assert advantages[0] == pytest.approx(2.4748737)
    assert advantages[1] == pytest.approx(-0.3535534)
    assert sample_std([1.0] + [0.0] * 7) == pytest.approx(0.3535534)
