"""The learning rate of each step."""

import pytest

from everburn.learning.schedules import learning_rate


def rates(kind: str, steps: int = 4, warmup: int = 0) -> list[float]:
    return [
        learning_rate(step, steps, 1.0, kind, warmup)  # type: ignore[arg-type]
        for step in range(1, steps + 1)
    ]


def test_constant_stays_at_the_peak() -> None:
    assert rates("constant") == [1.0, 1.0, 1.0, 1.0]


def test_linear_falls_in_equal_steps_and_the_last_step_still_trains() -> None:
    assert rates("linear") == [1.0, 0.75, 0.5, 0.25]


def test_cosine_falls_along_half_a_cosine() -> None:
    assert rates("cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


def test_warmup_rises_to_the_peak_before_the_schedule_falls() -> None:
    assert rates("linear", steps=6, warmup=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_a_step_beyond_total_steps_has_learning_rate_zero() -> None:
    assert learning_rate(9, 4, 1.0, "linear") == 0.0
