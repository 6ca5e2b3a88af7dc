"""The `train/*`, `perf/*` and `recovery/*` metrics of a step (docs/metrics.md)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.messages import Submitted
    from everburn.learning.diagnostics import distance_metrics
    from everburn.records.metrics import Number
    from workflows.messages import Recovered
    from workflows.run.state import Sent


class TrainerTime:
    """Workflow time in which the trainer had a request of the step. sent: by earlier executions."""

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self._spans: list[tuple[float, float]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """The block is one request; one that fails doesn't count."""
        started = workflow.time()
        yield
        self._spans.append((started, workflow.time()))

    @property
    def since(self) -> float | None:
        """When the first request was sent."""
        earliest = min((start for start, _ in self._spans), default=None)
        return earliest if self._sent.since is None else self._sent.since

    @property
    def busy(self) -> float:
        """Seconds with at least one request."""
        return self._sent.busy + union_seconds(self._spans)

    def metrics(self) -> dict[str, Number]:
        if not self._spans or self.since is None:
            return {}
        elapsed = max(end for _, end in self._spans) - self.since
        values: dict[str, Number] = {
            "perf/train_time": self.busy,
            "perf/train_wait_time": elapsed - self.busy,
        }
        if elapsed > 0:
            values["perf/wait_time_ratio"] = 1 - self.busy / elapsed
        return values


def gradient_metrics(submitted: list[Submitted]) -> dict[str, Number]:
    """What the submissions of a step report together."""
    tokens = sum(result.distance.tokens for result in submitted)
    if not tokens:
        return {}
    distance = distance_metrics([result.distance for result in submitted])
    return {"train/tokens": tokens, **distance, **loss_metrics(submitted)}


def loss_metrics(submitted: list[Submitted]) -> dict[str, float]:
    """`train/loss` per trained token, `train/total_tokens`, and the metrics of a Python loss as
    `loss/*`: means over the requests, weighted by their trained tokens. Absent if a request doesn't
    report it."""
    tokens = sum(result.distance.tokens for result in submitted)
    sums = [result.loss_sum for result in submitted]
    values = {}
    if None not in sums:
        values["train/loss"] = math.fsum(each for each in sums if each is not None) / tokens
    totals = [result.total_tokens for result in submitted]
    if None not in totals:
        values["train/total_tokens"] = math.fsum(each for each in totals if each is not None)
    names = set[str].intersection(*(set(result.loss_metrics) for result in submitted))
    for name in sorted(names):
        weighted = (r.loss_metrics[name] * r.distance.tokens for r in submitted)
        values[f"loss/{name}"] = math.fsum(weighted) / tokens
    return values


def recovery_metrics(recovered: Recovered | None) -> dict[str, Number]:
    if recovered is None:
        return {}
    return {
        "recovery/leases": recovered.leases,
        "recovery/redone_steps": recovered.redone_steps,
        "recovery/rollouts_reused": recovered.reused_rollouts,
        "recovery/seconds": recovered.seconds,
    }


def union_seconds(spans: list[tuple[float, float]]) -> float:
    """The time covered by at least one of the spans."""
    covered, until = 0.0, -math.inf
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
