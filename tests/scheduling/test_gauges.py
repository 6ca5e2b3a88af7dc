"""Gauges, by example and against a sum over unit intervals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everburn.scheduling.gauges import Gauges


def test_a_mean_is_weighted_by_time():
    gauges = Gauges.starting(100.0)
    gauges.set(100.0, {"in_flight": 8.0})
    gauges.set(100.9, {"in_flight": 0.0})
    assert gauges.close_window(101.0) == {"in_flight": pytest.approx(7.2)}


def test_values_persist_into_the_next_window():
    gauges = Gauges.starting(0.0)
    gauges.set(0.0, {"capacity": 6.0})
    gauges.close_window(10.0)
    assert gauges.close_window(11.0) == {"capacity": 6.0}


def test_a_window_without_duration_yields_the_current_values():
    gauges = Gauges.starting(5.0)
    gauges.set(5.0, {"capacity": 1.0})
    gauges.set(5.0, {"capacity": 3.0})
    assert gauges.close_window(5.0) == {"capacity": 3.0}


def test_a_gauge_without_a_current_value_is_absent():
    gauges = Gauges.starting(0.0)
    assert gauges.close_window(1.0) == {}
    gauges.set(1.0, {"staleness": 1.0, "concurrency": 2.0})
    gauges.set(2.0, {"staleness": 1.0})
    assert gauges.close_window(3.0) == {"staleness": 1.0}


def test_a_clock_that_goes_back_counts_no_time_twice():
    gauges = Gauges.starting(10.0)
    gauges.set(10.0, {"capacity": 4.0})
    gauges.set(20.0, {"capacity": 2.0})
    gauges.set(15.0, {"capacity": 6.0})
    assert gauges.close_window(30.0) == {"capacity": pytest.approx((10 * 4 + 10 * 6) / 20)}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 9), st.integers(0, 9)), min_size=1),
    st.lists(st.integers(0, 30)),
)
def test_means_equal_a_sum_over_unit_intervals(
    events: list[tuple[int, int, int]], closings: list[int]
):
    """events: (seconds since the previous event, two values). closings: ends of windows."""
    gauges = Gauges.starting(0.0)
    now, window_start = 0, 0
    timeline: list[tuple[int, int]] = []
    current = events[0][1:]
    gauges.set(0.0, {"a": current[0], "b": current[1]})
    for number, (elapsed, a, b) in enumerate(events):
        timeline += [current] * elapsed
        now += elapsed
        gauges.set(float(now), {"a": a, "b": b})
        gauges = Gauges.model_validate_json(gauges.model_dump_json())
        current = (a, b)
        if number in closings:
            window = timeline[window_start:now] or [current]
            expected = {
                name: pytest.approx(sum(seconds[index] for seconds in window) / len(window))
                for index, name in enumerate("ab")
            }
            assert gauges.close_window(float(now)) == expected
            window_start = now
