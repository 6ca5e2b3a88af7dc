"""Metrics that a trainer reports per request besides the loss, such as `report_policy_diagnostics`.

Owns the file of one request and the reduction over the requests of a step. The metrics travel
through the store, since the trainer decides their size. Doesn't own Everburn's diagnostics
(diagnostics.py). Light: commits read it.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field

from everburn.records.ids import LeaseKey
from everburn.records.keys import submission_metrics_key
from everburn.records.store import ArtifactStore

LOSS = "loss:sum"
"""Not stored here: it becomes train/loss."""


class RequestMetrics(BaseModel):
    """Metrics of one request, by `name:reduction`. tokens: its trained tokens, the weight of
    means."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = 0
    metrics: dict[str, float] = Field(default_factory=dict)


def record_reported(
    store: ArtifactStore,
    step: int,
    submission: int,
    lease: LeaseKey,
    tokens: int,
    metrics: Mapping[str, float],
) -> None:
    others = {name: value for name, value in metrics.items() if name != LOSS}
    request = RequestMetrics(tokens=tokens, metrics=others)
    store.put_json(submission_metrics_key(step, submission, lease), request.model_dump(mode="json"))


def find_reported(
    store: ArtifactStore, step: int, submissions: int, lease: LeaseKey
) -> list[RequestMetrics]:
    """The metrics of a step's requests; empty for a request whose file is missing."""
    keys = (submission_metrics_key(step, number, lease) for number in range(submissions))
    return [RequestMetrics.model_validate(store.find_json(key) or {}) for key in keys]


def reported_metrics(requests: Sequence[RequestMetrics]) -> dict[str, float]:
    """`trainer/<name>_<reduction>` over the requests of a step. A metric is absent if a request
    lacks it or its reduction is unknown."""
    if not requests:
        return {}
    names = set[str].intersection(*(set(request.metrics) for request in requests))
    values = {}
    for key in sorted(names):
        name, _, reduction = key.rpartition(":")
        combine = REDUCTIONS.get(reduction)
        if name and combine is not None:
            values[f"trainer/{name}_{reduction}"] = combine(
                [request.metrics[key] for request in requests],
                [request.tokens for request in requests],
            )
    return values


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    if not total:
        return math.fsum(values) / len(values)
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total


REDUCTIONS: Mapping[str, Callable[[Sequence[float], Sequence[int]], float]] = {
    "mean": _mean,
    "sum": lambda values, _: math.fsum(values),
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
}
