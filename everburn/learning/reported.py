"""What a trainer reports of its requests beside the loss, such as `report_policy_diagnostics`.

Owns the file of one request, and how the requests of a step are put together. It goes by the store
and not by messages, since nobody but the trainer decides how much there is. Doesn't own what the
numbers mean (the trainer's) or Everburn's own diagnostics (diagnostics.py). Light: commits read it.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field

from everburn.records.keys import submission_metrics_key
from everburn.records.store import ArtifactStore

LOSS = "loss:sum"
"""Becomes train/loss by itself."""


class Reported(BaseModel):
    """Of one request. metrics: `name:reduction`, as the trainer gave them. tokens: those that were
    trained, which weigh means."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = 0
    metrics: dict[str, float] = Field(default_factory=dict)


def record_reported(
    store: ArtifactStore,
    step: int,
    part: int,
    epoch: int,
    tokens: int,
    metrics: Mapping[str, float],
) -> None:
    """Keep what a request reported, for the step's record."""
    others = {name: value for name, value in metrics.items() if name != LOSS}
    found = Reported(tokens=tokens, metrics=others)
    store.put_json(submission_metrics_key(step, part, epoch), found.model_dump(mode="json"))


def find_reported(store: ArtifactStore, step: int, parts: int, epoch: int) -> list[Reported]:
    """What the requests of a step reported; a worker of an earlier build has kept nothing."""
    keys = (submission_metrics_key(step, part, epoch) for part in range(parts))
    found = [store.find_json(key) for key in keys]
    return [Reported() if each is None else Reported.model_validate(each) for each in found]


def reported_metrics(requests: Sequence[Reported]) -> dict[str, float]:
    """`trainer/<name>_<reduction>` over the requests of a step. Absent where a request doesn't
    tell, or where several can't be put together by the reduction."""
    if not requests:
        return {}
    names = set[str].intersection(*(set(request.metrics) for request in requests))
    values = {}
    for name in sorted(names):
        what, _, reduction = name.rpartition(":")
        combine = REDUCTIONS.get(reduction)
        if what and combine is not None:
            values[f"trainer/{what}_{reduction}"] = combine(
                [request.metrics[name] for request in requests],
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
