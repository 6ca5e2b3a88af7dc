"""Activities of rollout workers: everything that runs the user's code."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.failure_types import (
    RECOVERABLE,
    SNAPSHOT_GONE,
    WORKER_SHUTDOWN,
    application_error,
    final_errors,
)
from activities.imports import import_all
from activities.messages import (
    CompleteEvaluation,
    CompleteGroup,
    EvaluateFunction,
    EvaluationSummary,
    GroupSummary,
    Prepared,
    ReapResult,
    RolloutOrder,
    ShardOrder,
)
from activities.run_watch import RunWatch
from everburn.refs import RolloutOutcome, RunRef
from everburn.store import StoreError

if TYPE_CHECKING:
    from everburn.rollout_runner import RolloutRunner

T = TypeVar("T")

MAX_RUNS = 8
"""Runs whose user code a worker keeps loaded."""


def preload() -> None:
    """Import what the first rollout needs: tokenizers, and the SDK's samplers."""
    import_all(
        "everburn.rollout_runner",
        "transformers:AutoTokenizer",
        "fireworks.training.sdk:FiretitanSamplingClient",
        "fireworks.training.sdk:FixedConcurrencyController",
    )


class RolloutActivities:
    """Holds what is loaded once per process and run. User code runs on a loop of its own."""

    def __init__(self) -> None:
        from everburn.user_loop import UserLoop

        self._user_loop = UserLoop("rollouts")
        self._watch = RunWatch()
        self._runners: OrderedDict[RunRef, asyncio.Task[RolloutRunner]] = OrderedDict()

    @activity.defn
    async def prepare_task(self, run: RunRef) -> Prepared:
        await asyncio.to_thread(preload)
        from everburn.task import prepare_task

        with final_errors(StoreError):
            task = await self._in_user_loop(lambda: asyncio.to_thread(prepare_task, run))
        return Prepared(rows=task.rows, evaluation_rows=task.evaluation_rows, notes=task.notes)

    @activity.defn
    async def rollout(self, order: RolloutOrder) -> RolloutOutcome:
        """One completion of one row, to its terminal record."""
        from everburn.failures import classify

        try:
            runner = await self._runner(order.run)
            return await self._unless_gone(
                order.run, lambda: runner.complete(order.group, order.completion, order.version)
            )
        except asyncio.CancelledError as error:
            if activity.is_worker_shutdown():
                raise application_error(error, kind=WORKER_SHUTDOWN) from error
            raise
        except ApplicationError:
            raise
        except StoreError as error:
            raise application_error(error, kind=RECOVERABLE) from error
        except Exception as error:
            kind = {"recoverable": RECOVERABLE, "snapshot_gone": SNAPSHOT_GONE}.get(classify(error))
            where = f"run {order.run.id} · row {order.group.cursor} · completion {order.completion}"
            raise application_error(error, kind=kind, where=where) from error

    @activity.defn
    async def complete_group(self, order: CompleteGroup) -> GroupSummary:
        """Advantages, dynamic filter and manifest of a group whose completions have ended."""
        from everburn.config import Entrypoint
        from everburn.entrypoints import call
        from everburn.learning.advantages import advantage_function
        from everburn.learning.group import Group, complete_group
        from everburn.resources import reap_at_end

        runner = await self._runner(order.run)
        entrypoint: Entrypoint | None = runner.config.dynamic_filter

        def advantages(rewards: Sequence[float]) -> list[float]:
            try:
                return advantage_function(runner.config.advantages)(rewards)
            except Exception as error:
                where = f"run {order.run.id} · row {order.group.cursor} · advantages"
                raise application_error(error, where=where) from error

        def judge(group: Group) -> bool:
            assert entrypoint is not None
            try:
                return bool(call(entrypoint, group))
            except Exception as error:
                where = f"run {order.run.id} · row {order.group.cursor} · {entrypoint.name}"
                raise application_error(error, where=where) from error

        with final_errors(StoreError):
            await self._in_user_loop(lambda: reap_at_end(runner.store, order.group.name))
            manifest = await self._in_user_loop(
                lambda: asyncio.to_thread(
                    complete_group,
                    runner.store,
                    order.group,
                    order.version,
                    order.outcomes,
                    runner.config.min_group_size,
                    order.last,
                    lambda: runner.row(order.group.cursor),
                    judge if entrypoint is not None else None,
                    advantages,
                )
            )
        return GroupSummary(
            fate=manifest.fate,
            survivors=len(manifest.members),
            datums=manifest.datums,
            reward_sum=sum(manifest.rewards),
        )

    @activity.defn
    async def reap(self, run: RunRef) -> ReapResult:
        """Reap what completions whose workers died have left behind."""
        from everburn.resources import reap
        from everburn.store import ArtifactStore

        with final_errors(StoreError):
            done = await self._in_user_loop(lambda: reap(ArtifactStore.of(run)))
        return ReapResult(reaped=done.count, left=len(done.failures))

    @activity.defn
    async def evaluate_shard(self, order: ShardOrder) -> None:
        from everburn.evaluation import evaluate_shard

        with final_errors(Exception):
            runner = await self._runner(order.run)
            await self._unless_gone(
                order.run,
                lambda: evaluate_shard(runner, order.version, order.shard, order.start, order.stop),
            )

    @activity.defn
    async def evaluate_function(self, order: EvaluateFunction) -> EvaluationSummary:
        """The user's evaluation function, with the rollout function pinned to the version."""
        from everburn.evaluation import run_evaluation_function

        with final_errors(Exception):
            runner = await self._runner(order.run)
            values = await self._unless_gone(
                order.run, lambda: run_evaluation_function(runner, order.version)
            )
        return EvaluationSummary(metrics=values)

    @activity.defn
    async def complete_evaluation(self, order: CompleteEvaluation) -> EvaluationSummary:
        from everburn.evaluation import complete_evaluation

        values = await asyncio.to_thread(
            complete_evaluation,
            order.run,
            order.version,
            order.shards,
            order.seconds,
            order.values,
            order.error,
        )
        return EvaluationSummary(metrics=values)

    def close(self) -> None:
        """Stop the user loop."""
        self._user_loop.close()

    async def _unless_gone(self, run: RunRef, function: Callable[[], Awaitable[T]]) -> T:
        return await self._watch.unless_gone(run, self._in_user_loop(function))

    async def _in_user_loop(self, function: Callable[[], Awaitable[T]]) -> T:
        return await self._user_loop.run(function)

    async def _runner(self, run: RunRef) -> "RolloutRunner":
        """The run's user code, loaded once; a failed load is tried again by the next caller."""
        task = self._runners.get(run)
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(self._user_loop.run(lambda: _load(run)))
            self._runners[run] = task
            if len(self._runners) > MAX_RUNS:
                self._runners.popitem(last=False)
        return await asyncio.shield(task)


async def _load(run: RunRef) -> "RolloutRunner":
    await asyncio.to_thread(preload)
    from everburn.rollout_runner import RolloutRunner

    return RolloutRunner(run)
