"""Evaluation: one evaluation, pinned to a policy version, fail-open.

Owns the fan-out over held-out rows and the deadline. It always reports once; an error is part of
the report. Doesn't own when evaluations run, or when a shard is retried (retries.py).
"""

import asyncio
import math
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.contracts import RolloutContract
    from activities.failure_types import message_of
    from activities.messages import (
        CompleteEvaluation,
        EvaluateFunction,
        EvaluationSummary,
        RowsFailed,
        ShardOrder,
    )
    from activities.search_attributes import POLICY_VERSION, REWARD, RUN
    from everburn.rollouts.evaluation import SHARD_ROWS
    from workflows.children.retries import ONCE, AttemptsUsedUpError, in_attempts
    from workflows.messages import EvaluationOrder, EvaluationReport
    from workflows.queues import ROLLOUT_QUEUE

HEARTBEAT_TIMEOUT = timedelta(seconds=10)
MAX_SHARDS_IN_FLIGHT = 64


@workflow.defn
class Evaluation:
    @workflow.init
    def __init__(self, order: EvaluationOrder) -> None:
        self._order = order
        self._values: dict[str, float] = {}
        self._shards = 0
        self._failed = 0

    @workflow.run
    async def run(self, order: EvaluationOrder) -> None:
        started = workflow.time()
        try:
            await asyncio.wait_for(self._evaluate(), order.timeout)
            error = None
        except (Exception, asyncio.CancelledError) as failure:
            error = self._explain(failure, workflow.time() - started)
            workflow.set_current_details("")
        report = asyncio.create_task(self._report(workflow.time() - started, error))
        await asyncio.shield(report)

    async def _evaluate(self) -> None:
        order = self._order
        if order.search_attributes:
            workflow.upsert_search_attributes(
                [RUN.value_set(order.run.id), POLICY_VERSION.value_set(order.version)]
            )
        if order.rows == 0:
            summary = await in_attempts("the evaluation function", self._function)
            self._values = summary.metrics
            return
        slots = asyncio.Semaphore(MAX_SHARDS_IN_FLIGHT)
        self._shards = math.ceil(order.rows / SHARD_ROWS)
        shards = [asyncio.create_task(self._shard(i, slots)) for i in range(self._shards)]
        try:
            if order.count_failures:
                await workflow.wait(shards)
            await asyncio.gather(*shards)
        except (Exception, asyncio.CancelledError):
            for shard in shards:
                shard.cancel()
            raise

    async def _function(self, retry: int) -> EvaluationSummary:
        order = self._order
        summary: EvaluationSummary = await workflow.execute_activity_method(
            RolloutContract.evaluate_function,
            EvaluateFunction(
                run=order.run, incarnation=order.incarnation, version=order.version, retry=retry
            ),
            task_queue=ROLLOUT_QUEUE,
            start_to_close_timeout=timedelta(seconds=order.timeout),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            retry_policy=ONCE,
            summary=f"evaluation function · policy v{order.version}",
        )
        return summary

    async def _shard(self, shard: int, slots: asyncio.Semaphore) -> None:
        order = self._order
        start = shard * SHARD_ROWS
        stop = min(start + SHARD_ROWS, order.rows)

        async def evaluate(retry: int) -> None:
            await workflow.execute_activity_method(
                RolloutContract.evaluate_shard,
                ShardOrder(
                    run=order.run,
                    incarnation=order.incarnation,
                    version=order.version,
                    shard=shard,
                    start=start,
                    stop=stop,
                    retry=retry,
                ),
                task_queue=ROLLOUT_QUEUE,
                start_to_close_timeout=timedelta(seconds=order.timeout),
                heartbeat_timeout=HEARTBEAT_TIMEOUT,
                retry_policy=ONCE,
                summary=f"evaluation rows {start}-{stop - 1} · policy v{order.version}",
            )

        async with slots:
            try:
                await in_attempts(f"rows {start}-{stop - 1}", evaluate)
            except AttemptsUsedUpError as used_up:
                self._failed += _failed_rows(used_up.error)
                raise
            except ActivityError as error:
                self._failed += _failed_rows(error)
                raise

    def _explain(self, failure: BaseException, seconds: float) -> str:
        cancelled = is_cancelled_exception(failure)
        # An activity that the deadline ends reports only a cancellation.
        late = cancelled and seconds >= self._order.timeout
        if late or isinstance(failure, asyncio.TimeoutError):
            waits = workflow.get_current_details()
            text = f"not finished within evaluation_timeout ({self._order.timeout:g} s)"
            return f"{text}: {waits}" if waits else text
        if cancelled:
            return "cancelled"
        if isinstance(failure, AttemptsUsedUpError):
            return message_of(failure.error)
        if isinstance(failure, ActivityError):
            return message_of(failure)
        raise failure

    async def _report(self, seconds: float, error: str | None) -> None:
        order = self._order
        try:
            summary = await workflow.execute_activity_method(
                RolloutContract.complete_evaluation,
                CompleteEvaluation(
                    run=order.run,
                    version=order.version,
                    shards=self._shards,
                    values=self._values,
                    error=error,
                    seconds=seconds,
                ),
                task_queue=ROLLOUT_QUEUE,
                start_to_close_timeout=timedelta(minutes=5),
                heartbeat_timeout=HEARTBEAT_TIMEOUT,
                summary=f"evaluation report · policy v{order.version}",
            )
            metrics = summary.metrics
        except ActivityError as failure:
            metrics = {}
            error = error or f"the report couldn't be written: {failure.cause}"
        if order.search_attributes and "eval/reward" in metrics:
            workflow.upsert_search_attributes([REWARD.value_set(metrics["eval/reward"])])
        report = EvaluationReport(
            version=order.version,
            incarnation=order.incarnation,
            metrics=metrics,
            error=error,
            failed=self._failed,
        )
        try:
            await workflow.get_external_workflow_handle(order.run.id).signal(
                "evaluation_finished", report
            )
        except ApplicationError as failure:
            workflow.logger.info("run %s can't be reached: %s", order.run.id, failure)


def _failed_rows(error: ActivityError) -> int:
    """The failed rows that a shard reports; 0 if it failed for another reason."""
    details = error.cause.details if isinstance(error.cause, ApplicationError) else ()
    return RowsFailed.model_validate(details[0]).failed if details else 0
