"""The circuit breaker, by example and against a naive count over all outcomes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everburn.scheduling.breaker import CircuitBreaker

FAILED, SUCCEEDED = True, False


def breaker_after(outcomes: list[bool]) -> CircuitBreaker:
    breaker = CircuitBreaker()
    breaker.record(outcomes)
    return breaker


def test_five_failures_in_a_row_trip_the_breaker():
    assert breaker_after([FAILED] * 4).tripped is None
    assert breaker_after([FAILED] * 5).tripped == "5 rollouts failed in a row"


def test_a_success_resets_the_consecutive_count():
    assert breaker_after([FAILED] * 4 + [SUCCEEDED] + [FAILED] * 4).tripped is None


def test_the_failure_rate_applies_from_ten_outcomes():
    assert breaker_after([FAILED, SUCCEEDED] * 4 + [FAILED]).tripped is None
    assert breaker_after([FAILED, SUCCEEDED] * 5).tripped == "5 of the last 10 rollouts failed"


def test_half_of_the_last_twenty_outcomes_trips_the_breaker_and_less_does_not():
    few_failures = [FAILED, SUCCEEDED, SUCCEEDED] * 6
    assert breaker_after([SUCCEEDED] * 10 + few_failures).tripped is None
    nine_of_twenty = [SUCCEEDED, SUCCEEDED] + [FAILED, SUCCEEDED] * 9
    assert breaker_after(nine_of_twenty).tripped is None
    assert (
        breaker_after([*nine_of_twenty, SUCCEEDED, FAILED]).tripped
        == "10 of the last 20 rollouts failed"
    )


def test_only_the_last_twenty_outcomes_count():
    breaker = breaker_after([SUCCEEDED] * 1000 + [FAILED, SUCCEEDED] * 9)
    assert breaker.tripped is None
    assert len(breaker.window) == 20
    breaker.record([FAILED, SUCCEEDED])
    assert breaker.tripped == "10 of the last 20 rollouts failed"


def test_the_breaker_can_trip_in_the_middle_of_a_report():
    assert breaker_after([FAILED] * 5 + [SUCCEEDED] * 15).tripped == "5 rollouts failed in a row"


def test_the_breaker_stays_tripped_until_it_is_reset():
    breaker = breaker_after([FAILED] * 5)
    breaker.record([SUCCEEDED] * 100)
    assert breaker.tripped == "5 rollouts failed in a row"
    breaker.reset()
    assert (breaker.tripped, breaker.consecutive, breaker.window) == (None, 0, [])
    breaker.record([FAILED] * 4)
    assert breaker.tripped is None


def naive_trip(outcomes: list[bool]) -> int | None:
    """The number of outcomes after which the rule trips; a direct transcription."""
    for count in range(1, len(outcomes) + 1):
        past = outcomes[:count]
        in_a_row = count >= 5 and all(past[-5:])
        window = past[-20:]
        too_many = len(window) >= 10 and 2 * sum(window) >= len(window)
        if in_a_row or too_many:
            return count
    return None


@given(st.lists(st.booleans(), max_size=60), st.data())
def test_the_rule_does_not_depend_on_the_split_into_reports(
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
        assert tripped_after < expected, "tripped within the report that contains the outcome"


@pytest.mark.parametrize("outcomes", [[], [FAILED] * 5, [FAILED, SUCCEEDED] * 15])
def test_state_survives_json(outcomes: list[bool]):
    breaker = breaker_after(outcomes)
    assert CircuitBreaker.model_validate_json(breaker.model_dump_json()) == breaker
