"""RequestMetrics metrics of several requests reduce as if they had been one request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everburn.learning.reported import RequestMetrics, reported_metrics

numbers = st.lists(st.floats(-9, 9), min_size=1, max_size=6)


@given(st.lists(numbers, min_size=1, max_size=4))
def test_metrics_do_not_depend_on_the_split_into_requests(requests: list[list[float]]):
    def request(values: list[float]) -> RequestMetrics:
        mean = sum(values) / len(values)
        metrics = {"v:sum": sum(values), "v:mean": mean, "v:min": min(values), "v:max": max(values)}
        return RequestMetrics(tokens=len(values), metrics=metrics)

    joined = [value for values in requests for value in values]
    split = reported_metrics([request(values) for values in requests])
    assert split == pytest.approx(reported_metrics([request(joined)]))
    assert set(split) == {"trainer/v_sum", "trainer/v_mean", "trainer/v_min", "trainer/v_max"}


def test_metrics_that_cannot_be_combined_are_absent():
    first = RequestMetrics(
        tokens=1, metrics={"a:sum": 1.0, "b:sum": 1.0, "c:unique": 1.0, "d": 1.0}
    )
    second = RequestMetrics(tokens=1, metrics={"b:sum": 2.0, "c:unique": 1.0, "d": 1.0})
    assert reported_metrics([first, second]) == {"trainer/b_sum": 3.0}
    assert reported_metrics([first, RequestMetrics()]) == reported_metrics([]) == {}
