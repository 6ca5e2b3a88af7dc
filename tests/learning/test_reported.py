"""What requests report, put together as if they had been one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everburn.learning.reported import Reported, reported_metrics

numbers = st.lists(st.floats(-9, 9), min_size=1, max_size=6)


@given(st.lists(numbers, min_size=1, max_size=4))
def test_it_does_not_matter_how_tokens_were_cut_into_requests(requests: list[list[float]]):
    def told(values: list[float]) -> Reported:
        mean = sum(values) / len(values)
        metrics = {"v:sum": sum(values), "v:mean": mean, "v:min": min(values), "v:max": max(values)}
        return Reported(tokens=len(values), metrics=metrics)

    together = [value for values in requests for value in values]
    apart = reported_metrics([told(values) for values in requests])
    assert apart == pytest.approx(reported_metrics([told(together)]))
    assert set(apart) == {"trainer/v_sum", "trainer/v_mean", "trainer/v_min", "trainer/v_max"}


def test_what_cannot_be_put_together_is_absent():
    first = Reported(tokens=1, metrics={"a:sum": 1.0, "b:sum": 1.0, "c:unique": 1.0, "d": 1.0})
    second = Reported(tokens=1, metrics={"b:sum": 2.0, "c:unique": 1.0, "d": 1.0})
    assert reported_metrics([first, second]) == {"trainer/b_sum": 3.0}
    assert reported_metrics([first, Reported()]) == reported_metrics([]) == {}
