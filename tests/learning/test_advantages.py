"""Group advantages against an independent computation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everburn.learning.advantages import group_zscore, sample_std

REWARDS = st.lists(
    st.floats(min_value=-100, max_value=100, allow_nan=False, width=32), min_size=2, max_size=16
)


@given(REWARDS)
def test_they_are_zscores_with_the_sample_deviation(rewards: list[float]) -> None:
    values = np.asarray(rewards, dtype=np.float64)
    std = values.std(ddof=1)
    expected = np.zeros_like(values) if std < 1e-8 else (values - values.mean()) / std

    np.testing.assert_allclose(group_zscore(rewards), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rewards", [[], [1.0], [0.5, 0.5, 0.5], [1.0, 1.0 + 1e-9]])
def test_without_a_spread_there_is_nothing_to_learn(rewards: list[float]) -> None:
    assert group_zscore(rewards) == [0.0] * len(rewards)


def test_one_of_eight() -> None:
    advantages = group_zscore([1.0] + [0.0] * 7)
    assert advantages[0] == pytest.approx(2.4748737)
    assert advantages[1] == pytest.approx(-0.3535534)
    assert sample_std([1.0] + [0.0] * 7) == pytest.approx(0.3535534)
