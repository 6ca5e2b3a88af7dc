"""The circuit breaker, by example and against a count over the whole list of outcomes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everburn.scheduling.breaker import CircuitBreaker

FAILED, SUCCEEDED = True, False


def after(outcomes: list[bool]) -> CircuitBreaker:
    breaker = CircuitBreaker()
    breaker.record(outcomes)
    return breaker


def test_five_failures_in_a_row_trip_it():
    assert after([FAILED] * 4).tripped is None
    assert after([FAILED] * 5).tripped == "5 rollouts failed in a row"


def test_a_success_resets_the_consecutive_count():
    assert after([FAILED] * 4 + [SUCCEEDED] + [FAILED] * 4).tripped is None


def test_no_failure_rate_is_judged_before_ten_outcomes():
    assert after([FAILED, SUCCEEDED] * 4 + [FAILED]).tripped is None
    assert after([FAILED, SUCCEEDED] * 5).tripped == "5 of the last 10 rollouts failed"


def test_half_of_the_last_twenty_trips_it_and_less_does_not():
    calm = [FAILED, SUCCEEDED, SUCCEEDED] * 6
    assert after([SUCCEEDED] * 10 + calm).tripped is None
    nine_of_twenty = [SUCCEEDED, SUCCEEDED] + [FAILED, SUCCEEDED] * 9
    assert after(nine_of_twenty).tripped is None
    assert (
        after([*nine_of_twenty, SUCCEEDED, FAILED]).tripped == "10 of the last 20 rollouts failed"
    )


def test_only_the_last_twenty_outcomes_count():
    breaker = after([SUCCEEDED] * 1000 + [FAILED, SUCCEEDED] * 9)
    assert breaker.tripped is None
    assert len(breaker.window) == 20
    breaker.record([FAILED, SUCCEEDED])
    assert breaker.tripped == "10 of the last 20 rollouts failed"


def test_it_trips_in_the_middle_of_a_report():
    assert after([FAILED] * 5 + [SUCCEEDED] * 15).tripped == "5 rollouts failed in a row"


def test_it_stays_tripped_until_a_person_resets_it():
    breaker = after([FAILED] * 5)
    breaker.record([SUCCEEDED] * 100)
    assert breaker.tripped == "5 rollouts failed in a row"
    breaker.reset()
    assert (breaker.tripped, breaker.consecutive, breaker.window) == (None, 0, [])
    breaker.record([FAILED] * 4)
    assert breaker.tripped is None


def naive_trip(outcomes: list[bool]) -> int | None:
    """How many outcomes it takes to trip, by the rule as it is written."""
    for seen in range(1, len(outcomes) + 1):
        past = outcomes[:seen]
        in_a_row = seen >= 5 and all(past[-5:])
        window = past[-20:]
        too_many = len(window) >= 10 and 2 * sum(window) >= len(window)
        if in_a_row or too_many:
            return seen
    return None


@given(st.lists(st.booleans(), max_size=60), st.data())
def test_it_follows_the_rule_however_outcomes_are_reported(
    outcomes: list[bool], data: st.DataObject
):
    breaker = CircuitBreaker()
    tripped_after = None
    reported = 0
    while reported < len(outcomes):
        count = data.draw(st.integers(1, len(outcomes) - reported))
        breaker.record(outcomes[reported : reported + count])
        reported += count
        breaker = CircuitBreaker.model_validate_json(breaker.model_dump_json())
        if breaker.tripped and tripped_after is None:
            tripped_after = reported - count
    expected = naive_trip(outcomes)
    assert (breaker.tripped is None) == (expected is None)
    if expected is not None:
        assert tripped_after is not None
        assert tripped_after < expected, "it tripped within the report that holds the outcome"


@pytest.mark.parametrize("outcomes", [[], [FAILED] * 5, [FAILED, SUCCEEDED] * 15])
def test_state_survives_json(outcomes: list[bool]):
    breaker = after(outcomes)
    assert CircuitBreaker.model_validate_json(breaker.model_dump_json()) == breaker
