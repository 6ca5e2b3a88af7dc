"""Activities of rollout workers: everything that runs the user's code."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.failure_types import (
    RECOVERABLE,
    SNAPSHOT_GONE,
    STORE_FAILED,
    STORE_FULL,
    WORKER_SHUTDOWN,
    application_error,
    final_errors,
)
from activities.messages import (
    CompleteEvaluation,
    CompleteGroup,
    EvaluateFunction,
    EvaluationSummary,
    Prepared,
    ReapResult,
    RolloutOrder,
    RowsFailed,
    RunLife,
    ShardOrder,
)
from activities.run_watch import RunWatch, last_look
from activities.runners import Runners, preload
from everburn.records.ids import GroupResult, RolloutOutcome, RunRef
from everburn.records.store import StoreError, when_there_is_space
from everburn.usercode.threads import in_thread

if TYPE_CHECKING:
    from everburn.learning.group import GroupManifest
    from everburn.rollouts.runner import RolloutRunner

T = TypeVar("T")

JUDGE_TIMEOUT = 240.0
"""Seconds for a group to be read and judged by the user's functions; its activity has five minutes.
The thread of one that never returns stays, and holds up nobody."""

_KINDS = {
    "recoverable": RECOVERABLE,
    "snapshot_gone": SNAPSHOT_GONE,
    "store_failed": STORE_FAILED,
    "store_full": STORE_FULL,
}


class RolloutActivities:
    """Holds what is loaded once per process and run. User code runs on a loop of its own."""

    def __init__(self) -> None:
        from everburn.usercode.loop import UserLoop

        self._user_loop = UserLoop("rollouts")
        self._watch = RunWatch()
        self._runners = Runners(self._user_loop)

    @activity.defn
    async def prepare_task(self, run: RunRef) -> Prepared:
        await asyncio.to_thread(preload)
        from everburn.rollouts.task import prepare_task
        from everburn.usercode.loop import LoopBlockedError

        with final_errors(StoreError, LoopBlockedError):
            task = await self._user_loop.run(lambda: in_thread(lambda: prepare_task(run)))
            async with self._runners.using(run):
                pass  # the rollout function can be made, and is ready for the first rollouts
        return Prepared(rows=task.rows, evaluation_rows=task.evaluation_rows, notes=task.notes)

    @activity.defn
    async def rollout(self, order: RolloutOrder) -> RolloutOutcome:
        """One completion of one row, to its terminal record."""
        where = f"run {order.run.id} · row {order.group.cursor} · completion {order.completion}"
        with _told_by_kind(where):
            async with self._runners.using(order.run) as runner:
                return await self._user_code(
                    order.within,
                    lambda: runner.complete(
                        order.group, order.completion, order.version, order.tries
                    ),
                    runner.config.rollout_timeout,
                )

    @activity.defn
    async def complete_group(self, order: CompleteGroup) -> GroupResult:
        """Advantages, dynamic filter and manifest of a group whose completions have ended."""
        look = last_look(order.within)
        async with self._runners.using(order.run) as runner:
            manifest = await self._user_loop.run(lambda: _complete_group(runner, order, look))
        return manifest.result

    @activity.defn
    async def reap(self, run: RunRef) -> ReapResult:
        """Reap what completions whose workers died have left behind."""
        from everburn.records.store import ArtifactStore
        from everburn.rollouts.sandboxes import reap
        from everburn.usercode.loop import LoopBlockedError

        with final_errors(StoreError, LoopBlockedError):
            done = await self._user_loop.run(lambda: reap(ArtifactStore.of(run)))
        return ReapResult(left=len(done.failures))

    @activity.defn
    async def evaluate_shard(self, order: ShardOrder) -> None:
        from everburn.rollouts.evaluation import evaluate_shard

        rows = f"{order.start}-{order.stop - 1}"
        with _told_by_kind(f"run {order.run.id} · evaluation rows {rows}"):
            async with self._runners.using(order.run) as runner:
                await self._user_code(
                    order.within,
                    lambda: evaluate_shard(
                        runner, order.version, order.shard, order.start, order.stop, order.tries
                    ),
                    runner.config.rollout_timeout,
                )

    @activity.defn
    async def evaluate_function(self, order: EvaluateFunction) -> EvaluationSummary:
        """The user's evaluation function, with the rollout function pinned to the version."""
        from everburn.rollouts.evaluation import run_evaluation_function

        with _told_by_kind(f"run {order.run.id} · evaluation function"):
            async with self._runners.using(order.run) as runner:
                values = await self._user_code(
                    order.within,
                    lambda: run_evaluation_function(runner, order.version, order.tries),
                    runner.config.evaluation_timeout,
                )
        return EvaluationSummary(metrics=values)

    @activity.defn
    async def complete_evaluation(self, order: CompleteEvaluation) -> EvaluationSummary:
        from everburn.rollouts.evaluation import complete_evaluation

        with final_errors(StoreError):
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
        """Return once user code has blocked its loop for longer than it may: where, as a stack."""
        return await self._user_loop.blocked()

    def close(self) -> None:
        """Stop the user loop, and close what is loaded."""
        self._user_loop.close(self._runners.close)

    def join(self, seconds: float) -> bool:
        """Wait until that has come to pass: what was cancelled has given back what it had made.
        Returns whether it has."""
        return self._user_loop.join(seconds)

    async def _user_code(
        self, within: RunLife, function: Callable[[], Awaitable[T]], may_block: float
    ) -> T:
        """Await user code that nobody but the run waits for. may_block: seconds that it may keep
        the loop to itself."""
        return await self._watch.unless_gone(within, self._user_loop.run(function, may_block))


@contextmanager
def _told_by_kind(where: str) -> Iterator[None]:
    """Errors of user code become those that workflows decide by. where: of those that don't say."""
    from everburn.rollouts.failures import RowsFailedError, classify, decisive_error
    from everburn.usercode.loop import LoopBlockedError

    try:
        yield
    except asyncio.CancelledError as error:
        if activity.is_worker_shutdown():
            raise application_error(error, kind=WORKER_SHUTDOWN) from error
        raise
    except ApplicationError:
        raise
    except LoopBlockedError as error:
        raise application_error(error, kind=WORKER_SHUTDOWN, where=where) from error
    except RowsFailedError as rows:
        first = decisive_error(rows.first)
        counted = RowsFailed(failed=rows.failed)
        kind = _KINDS.get(classify(first))
        raise application_error(first, counted, kind=kind, where=rows.where) from first
    except Exception as error:
        told = decisive_error(error)
        raise application_error(told, kind=_KINDS.get(classify(told)), where=where) from told


async def _complete_group(
    runner: "RolloutRunner", order: CompleteGroup, look: Callable[[], None]
) -> "GroupManifest":
    from everburn.learning.group import keep_group
    from everburn.rollouts.sandboxes import reap_at_end

    with final_errors(StoreError):
        await reap_at_end(runner.store, order.group.name)
        manifest = await _judge_group(runner, order)
        return await when_there_is_space(keep_group, runner.store, manifest, look)


async def _judge_group(runner: "RolloutRunner", order: CompleteGroup) -> "GroupManifest":
    """The group's outcome, by the user's functions, each of which is told by its name."""
    from everburn.learning.advantages import advantage_function
    from everburn.learning.group import Group, judge_group
    from everburn.usercode.entrypoints import call

    entrypoint = runner.config.dynamic_filter
    row = f"run {order.run.id} · row {order.group.cursor}"
    at_work = ""

    def asked(name: str, function: Callable[[], T]) -> T:
        nonlocal at_work
        at_work = name
        try:
            return function()
        except (Exception, SystemExit) as error:
            raise application_error(error, where=f"{row} · {name}") from error
        finally:
            at_work = ""

    def advantages(rewards: Sequence[float]) -> list[float]:
        function = advantage_function(runner.config.advantages)
        return asked("advantages", lambda: function(rewards))

    def keep(group: Group) -> bool:
        assert entrypoint is not None
        return asked(entrypoint.name, lambda: bool(call(entrypoint, group)))

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
        if not at_work:
            raise StoreError(f"{row}: not read within {JUDGE_TIMEOUT:g} s") from None
        late = TimeoutError(f"it hasn't returned within {JUDGE_TIMEOUT:g} s")
        raise application_error(late, where=f"{row} · {at_work}") from None
