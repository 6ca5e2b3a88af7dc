"""Activities of rollout workers: everything that runs the user's code."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from temporalio import activity
from temporalio.client import Client

from activities.contracts import RolloutContract
from activities.failure_types import application_error
from activities.liveness import RunLiveness
from activities.messages import (
    CompleteEvaluation,
    CompleteGroup,
    EvaluateFunction,
    EvaluationSummary,
    Prepared,
    ReapResult,
    RolloutOrder,
    RunIncarnation,
    ShardOrder,
)
from activities.runners import Runners
from everburn.learning.advantages import advantage_function
from everburn.learning.group import Group, GroupManifest, judge_group, keep_group
from everburn.records.ids import GroupResult, RolloutOutcome, RunRef
from everburn.records.store import ArtifactStore, StoreError, when_there_is_space
from everburn.rollouts.evaluation import (
    complete_evaluation,
    evaluate_shard,
    run_evaluation_function,
)
from everburn.rollouts.runner import RolloutRunner
from everburn.rollouts.sandboxes import reap, reap_at_end
from everburn.rollouts.task import prepare_task
from everburn.usercode.entrypoints import call
from everburn.usercode.loop import UserLoop
from everburn.usercode.threads import in_thread

T = TypeVar("T")

JUDGE_TIMEOUT = 240.0
"""Seconds to read a group and judge it with the user's functions; its activity has five minutes.
The thread of a function that never returns remains, and delays nothing else."""


class RolloutActivities(RolloutContract):
    """Holds the user code loaded per run. It runs on a loop of its own."""

    def __init__(self, client: Client) -> None:
        self._user_loop = UserLoop("rollouts")
        self._liveness = RunLiveness(client)
        self._runners = Runners(self._user_loop)

    @activity.defn
    async def prepare_task(self, run: RunRef) -> Prepared:
        task = await self._user_loop.run(lambda: in_thread(lambda: prepare_task(run)))
        async with self._runners.using(run):
            pass  # checks that the rollout function loads, and keeps it for the first rollouts
        return Prepared(rows=task.rows, evaluation_rows=task.evaluation_rows, notes=task.notes)

    @activity.defn
    async def rollout(self, order: RolloutOrder) -> RolloutOutcome:
        async with self._runners.using(order.run) as runner:
            return await self._user_code(
                order.within,
                lambda: runner.complete(order.group, order.completion, order.version, order.retry),
                runner.config.rollout_timeout,
            )

    @activity.defn
    async def complete_group(self, order: CompleteGroup) -> GroupResult:
        last_check = self._liveness.last_check(order.within)
        async with self._runners.using(order.run) as runner:
            manifest = await self._user_loop.run(lambda: _complete_group(runner, order, last_check))
        return manifest.result

    @activity.defn
    async def reap(self, run: RunRef) -> ReapResult:
        done = await self._user_loop.run(lambda: reap(ArtifactStore.of(run)))
        return ReapResult(left=len(done.failures))

    @activity.defn
    async def evaluate_shard(self, order: ShardOrder) -> None:
        async with self._runners.using(order.run) as runner:
            await self._user_code(
                order.within,
                lambda: evaluate_shard(
                    runner, order.version, order.shard, order.start, order.stop, order.retry
                ),
                runner.config.rollout_timeout,
            )

    @activity.defn
    async def evaluate_function(self, order: EvaluateFunction) -> EvaluationSummary:
        async with self._runners.using(order.run) as runner:
            values = await self._user_code(
                order.within,
                lambda: run_evaluation_function(runner, order.version, order.retry),
                runner.config.evaluation_timeout,
            )
        return EvaluationSummary(metrics=values)

    @activity.defn
    async def complete_evaluation(self, order: CompleteEvaluation) -> EvaluationSummary:
        values = await when_there_is_space(
            complete_evaluation,
            order.run,
            order.version,
            order.shards,
            order.seconds,
            order.values,
            order.error,
        )
        return EvaluationSummary(metrics=values)

    async def blocked(self) -> str:
        """Return the stack of user code once it has blocked its loop for too long."""
        return await self._user_loop.blocked()

    def close(self) -> None:
        """Stop the user loop, and close the loaded user code."""
        self._user_loop.close(self._runners.close)

    def join(self, seconds: float) -> bool:
        """Wait until `close` is complete and cancelled rollouts have cleaned up; returns whether
        they have."""
        return self._user_loop.join(seconds)

    async def _user_code(
        self, within: RunIncarnation, function: Callable[[], Awaitable[T]], may_block: float
    ) -> T:
        """Await user code while its run is alive. may_block: seconds that it may block the loop."""
        return await self._liveness.while_alive(within, self._user_loop.run(function, may_block))


async def _complete_group(
    runner: RolloutRunner, order: CompleteGroup, last_check: Callable[[], None]
) -> GroupManifest:
    await reap_at_end(runner.store, order.group.name)
    manifest = await _judge_group(runner, order)
    return await when_there_is_space(keep_group, runner.store, manifest, last_check)


async def _judge_group(runner: RolloutRunner, order: CompleteGroup) -> GroupManifest:
    """Determine the group's outcome with the user's functions, which error texts name."""
    entrypoint = runner.config.dynamic_filter
    running = ""

    def run_named(name: str, function: Callable[[], T]) -> T:
        nonlocal running
        running = name
        try:
            return function()
        except (Exception, SystemExit) as error:
            raise application_error(error, where=f"{order.where} · {name}") from error
        finally:
            running = ""

    def advantages(rewards: Sequence[float]) -> list[float]:
        function = advantage_function(runner.config.advantages)
        return run_named("advantages", lambda: function(rewards))

    def keep(group: Group) -> bool:
        assert entrypoint is not None
        return run_named(entrypoint.name, lambda: bool(call(entrypoint, group)))

    judging = partial(
        judge_group,
        runner.store,
        order.group,
        order.version,
        order.outcomes,
        runner.config.min_group_size,
        order.last,
        lambda: runner.row(order.group.cursor),
        keep if entrypoint is not None else None,
        advantages,
    )
    try:
        async with asyncio.timeout(JUDGE_TIMEOUT):
            return await in_thread(judging)
    except TimeoutError:
        if not running:
            raise StoreError(f"{order.where}: not read within {JUDGE_TIMEOUT:g} s") from None
        late = TimeoutError(f"it hasn't returned within {JUDGE_TIMEOUT:g} s")
        raise application_error(late, where=f"{order.where} · {running}") from None
