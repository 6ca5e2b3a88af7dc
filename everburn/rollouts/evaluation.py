"""Evaluations: held-out rows in shards, merged into one report per policy version.

Owns the report, its metrics, and the before/after comparison. Doesn't own when an evaluation runs
(the workflow) or the rollout of a row (runner.py).
"""

import asyncio
import contextlib
import inspect
import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict

from everburn.records.ids import RunRef
from everburn.records.keys import (
    evaluation_figures_key,
    evaluation_folder,
    evaluation_key,
    evaluation_row_key,
    evaluation_shard_key,
)
from everburn.records.publications import find_publication
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore, through_outages, when_there_is_space
from everburn.rollouts.failures import WORST_FIRST, RowsFailedError, classify
from everburn.rollouts.runner import RolloutRunner
from everburn.usercode.deadlines import user_timeout
from everburn.usercode.entrypoints import call
from everburn.usercode.threads import to_thread

SHARD_ROWS = 32
"""Rows per activity: enough to fill a sampler's batch, few enough to lose little to a crash."""

MAX_FIGURES_BYTES = 1500
"""Limit for the result of an evaluation function: its figures travel in history."""

BEFORE_KEY = "eval-before.json"
AFTER_KEY = "eval-after.json"


class EvaluationSample(BaseModel):
    """One held-out completion."""

    model_config = ConfigDict(extra="forbid")

    prompt: str
    reward: float
    info: dict[str, Any]
    answer: str
    output_tokens: int
    at_token_limit: bool


class EvaluationReport(BaseModel):
    """The file of one evaluation."""

    model_config = ConfigDict(extra="forbid")

    snapshot: str
    temperature: float
    max_tokens: int
    samples: list[EvaluationSample]


async def evaluate_shard(
    runner: RolloutRunner, version: int, shard: int, start: int, stop: int, retry: int = 0
) -> None:
    """Evaluate rows start..stop-1 and write their samples. Finished shards and rows aren't
    repeated. retry: earlier attempts at the shard.

    Raises:
        RowsFailedError: an evaluation without some rows would mislead. A fatal error cancels the
            other rows, unless `on_any_rollout_failure` counts all failures. Otherwise the other
            rows finish first, so that only failed rows are repeated. No row outlives the call.
    """
    key = evaluation_shard_key(version, shard)
    if await to_thread(runner.store.exists, key):
        return
    failures: dict[int, Exception] = {}
    count_all = runner.config.on_any_rollout_failure == "fail"

    async def evaluate(index: int) -> dict[str, Any] | None:
        try:
            return await runner.evaluate(index, version, retry)
        except Exception as error:
            failures[index] = error
            if classify(error) == "fatal" and not count_all:
                raise
            return None

    rows = range(start, stop)
    with contextlib.suppress(ExceptionGroup):  # the fatal error is among the failures
        async with asyncio.TaskGroup() as group:
            samples = [group.create_task(evaluate(index)) for index in rows]
    if failures:
        kinds = {index: classify(error) for index, error in failures.items()}
        first = min(kinds, key=lambda index: WORST_FIRST.index(kinds[index]))
        counted = sum(kind in ("fatal", "recoverable") for kind in kinds.values())
        raise RowsFailedError(counted, failures[first], runner.held_out(first))
    write = partial(runner.store.put_json, once=True)
    await when_there_is_space(write, key, [sample.result() for sample in samples])
    kept = [evaluation_row_key(version, index) for index in rows]
    await to_thread(runner.store.discard, *kept)


async def run_evaluation_function(
    runner: RolloutRunner, version: int, retry: int = 0
) -> dict[str, float]:
    """The figures of the run's evaluation function, which is called once per version (its argument
    `step`). retry: earlier attempts.

    Raises:
        ValueError: it didn't return a dict of finite numbers, or returned too many.
    """
    store, key = runner.store, evaluation_figures_key(version)
    known: dict[str, float] | None = await to_thread(store.find_json, key)
    if known is not None:
        return known
    figures = await _call_evaluation_function(runner, version, retry)
    await through_outages(partial(store.put_json, once=True), key, figures)
    await to_thread(_delete_call_logs, store, version)
    return figures


def _delete_call_logs(store: ArtifactStore, version: int) -> None:
    folder = evaluation_folder(version)
    store.discard(*(key for key in store.keys(folder) if key.startswith(f"{folder}/_calls-")))


async def _call_evaluation_function(
    runner: RolloutRunner, version: int, retry: int
) -> dict[str, float]:
    if runner.config.evaluation is None:
        raise ValueError("the run names no evaluation function")
    name = runner.config.evaluation.name
    values = call(runner.config.evaluation, version, runner.evaluation_rollout_fn(version, retry))
    if inspect.isawaitable(values):
        async with user_timeout(None):  # the activity's timeout applies
            values = await values
    if not isinstance(values, dict):
        raise ValueError(f"{name} returned {type(values).__name__}, not a dict of numbers")
    for key, value in values.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} returned {key}={value!r}, not a finite number")
    figures = {str(key): float(value) for key, value in values.items()}
    size = len(json.dumps(figures))
    if size > MAX_FIGURES_BYTES:
        raise ValueError(
            f"{name} returned {len(figures)} figures of {size} bytes, and {MAX_FIGURES_BYTES} are "
            "allowed: return the means that matter, and write the rest to a file of your own"
        )
    return figures


def complete_evaluation(
    run: RunRef,
    version: int,
    shards: int,
    seconds: float,
    own: Mapping[str, float],
    error: str | None,
) -> dict[str, float]:
    """The figures of an evaluation, as `eval/*` metrics; merges its shards into a report.

    own: the result of an evaluation function, in place of shards. A failed evaluation (`error`)
    has no report and the metric `eval/failed`; training continues.
    """
    store = ArtifactStore.of(run)
    values = {"eval/wall_time": seconds} | {f"eval/{name}": v for name, v in own.items()}
    if error is not None:
        values["eval/failed"] = 1.0
    elif shards:
        report = _merge(store, run, version, shards)
        store.put_json(evaluation_key(version), report.model_dump(mode="json"))
        values |= {f"eval/{name}": value for name, value in summarize(report).items()}
    return values


def _merge(store: ArtifactStore, run: RunRef, version: int, shards: int) -> EvaluationReport:
    config = stored_config(run)
    publication = find_publication(store, version)
    samples = [
        EvaluationSample.model_validate(sample)
        for shard in range(shards)
        for sample in store.get_json(evaluation_shard_key(version, shard))
    ]
    return EvaluationReport(
        snapshot=publication.snapshot if publication else f"version {version}",
        temperature=config.evaluation_temperature,
        max_tokens=config.max_completion_tokens,
        samples=samples,
    )


def summarize(report: EvaluationReport) -> dict[str, float]:
    """The figures of the before/after table.

    Counts: samples, correct (full reward), at_token_limit; if the grader reports the answer that
    it read (`info.got`), also invalid (none) and wrong (not correct). Means: reward,
    output_tokens.
    """
    samples = report.samples
    count = len(samples)
    values = {
        "samples": float(count),
        "reward": math.fsum(s.reward for s in samples) / count,
        "correct": float(sum(s.reward >= 1 for s in samples)),
        "at_token_limit": float(sum(s.at_token_limit for s in samples)),
        "output_tokens": math.fsum(s.output_tokens for s in samples) / count,
    }
    if all("got" in s.info for s in samples):
        missed = [s for s in samples if s.reward < 1]
        values["invalid"] = float(sum(s.info["got"] is None for s in missed))
        values["wrong"] = float(sum(s.info["got"] is not None for s in missed))
    return values


def load_report(store: ArtifactStore, key: str) -> EvaluationReport | None:
    found = store.find_json(key)
    return None if found is None else EvaluationReport.model_validate(found)


def keep_before_and_after(run: RunRef, initial_version: int, final_version: int) -> None:
    """Copy the first and the last report to files with fixed names."""
    store = ArtifactStore.of(run)
    for key, version in ((BEFORE_KEY, initial_version), (AFTER_KEY, final_version)):
        report = load_report(store, evaluation_key(version))
        if report is not None:
            store.put_json(key, report.model_dump(mode="json"))
