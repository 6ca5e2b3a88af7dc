"""PromptGroup: all completions of one row, from fan-out to the group's report.

Owns the retries of a completion and the group's single report. Doesn't own admission or what a
fate means for the run: that is its parent's, which it reaches by signals to the run's workflow id.
"""

import asyncio
import math
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    TimeoutError,
    TimeoutType,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from activities.failure_types import (
        RECOVERABLE,
        SNAPSHOT_GONE,
        WORKER_SHUTDOWN,
        WORKER_UNFIT,
    )
    from activities.messages import CompleteGroup, RolloutOrder
    from activities.reconciliation import ReconciliationActivities
    from activities.rollouts import RolloutActivities
    from everburn.refs import RolloutOutcome
    from workflows.messages import ROLLOUT_FAILED, GroupOrder, GroupReport, Released
    from workflows.queues import ORCHESTRATOR_QUEUE, ROLLOUT_QUEUE

HEARTBEAT_TIMEOUT = timedelta(seconds=6)
"""How long a rollout worker can be dead before its work is given to others, and thrice how long
a cancelled call runs on. Each beat costs the server 0.4 ms."""
OVERTIME = timedelta(seconds=60)
"""Beyond its own deadline, before a completion whose code blocks is given up from outside."""
WORKER_LOST = "WorkerLost"
MAX_FAILURES = 3
"""Recoverable failures of a completion before its draw is dropped."""
MAX_LOSSES = 10
"""Lost workers before they count as a failure: a row that kills its worker each time must not do so
for ever, since all that runs beside it dies too."""
BACKOFF = (1, 2, 4, 8, 15)
"""Seconds before another try."""
MAX_ERROR = 120
"""Characters of a failure kept per completion."""


@workflow.defn
class PromptGroup:
    @workflow.init
    def __init__(self, order: GroupOrder) -> None:
        self._order = order
        self._outcomes: list[RolloutOutcome] = []
        self._reported = 0

    @workflow.run
    async def run(self, order: GroupOrder) -> None:
        work = asyncio.create_task(self._to_the_end())
        watch = asyncio.create_task(self._cancel_if_orphaned(work))
        try:
            report = await asyncio.shield(work)
        except asyncio.CancelledError:
            work.cancel()
            report = await asyncio.shield(work)
        finally:
            watch.cancel()
        await self._report(report)

    async def _to_the_end(self) -> GroupReport:
        key, version = self._order.key, self._order.version
        completions = [
            asyncio.create_task(self._complete(index)) for index in range(self._order.completions)
        ]
        try:
            await asyncio.gather(*completions)
            return await self._complete_group()
        except (Exception, asyncio.CancelledError) as error:
            for task in completions:
                task.cancel()
            if is_cancelled_exception(error):
                return GroupReport(key=key, version=version, fate="cancelled")
            if not isinstance(error, ActivityError | ApplicationError):
                raise
            cause = error.cause if isinstance(error, ActivityError) else error
            return GroupReport(
                key=key,
                version=version,
                fate="fatal",
                error=getattr(cause, "message", str(cause)),
                error_type=getattr(cause, "type", None) or type(cause).__name__,
            )

    async def _cancel_if_orphaned(self, work: "asyncio.Task[GroupReport]") -> None:
        """A terminated run can't cancel its groups: they look for it themselves, ever more rarely,
        since each look costs events."""
        for wait in (60, 120, 240, *[600] * 1000):
            await workflow.sleep(wait, summary="does the run still exist?")
            is_open = await workflow.execute_activity_method(
                ReconciliationActivities.run_is_open,
                self._order.run,
                task_queue=ORCHESTRATOR_QUEUE,
                start_to_close_timeout=timedelta(minutes=1),
                summary="does the run still exist?",
            )
            if not is_open:
                workflow.logger.warning("run %s is gone; its work is cancelled", self._order.run.id)
                work.cancel()
                return

    async def _complete(self, completion: int) -> None:
        """One completion to its terminal record, through retries. Raises what is fatal."""
        failures = losses = missing = 0
        while True:
            try:
                outcome = await self._rollout(completion)
                break
            except ActivityError as error:
                kind = _kind(error)
                if kind is None:
                    raise
                if kind == RECOVERABLE:
                    failures += 1
                elif kind == SNAPSHOT_GONE:
                    # However long its recovery takes, it says nothing about the completion.
                    missing += 1
                else:
                    losses += 1
                if failures >= MAX_FAILURES or losses >= MAX_LOSSES:
                    outcome = self._failed(completion, error)
                    break
                delay: float = BACKOFF[min(failures + losses + missing, len(BACKOFF)) - 1]
                if kind == WORKER_LOST:
                    # Scattered: beside one that kills its worker each time, all would die again.
                    delay = 0 if losses == 1 else delay * workflow.random().random()
                if kind != WORKER_SHUTDOWN and delay:
                    await workflow.sleep(delay, summary=f"completion {completion}: {kind}")
        self._outcomes.append(outcome)
        await self._release()

    def _failed(self, completion: int, error: ActivityError) -> RolloutOutcome:
        cause = error.cause
        text = getattr(cause, "message", None) or str(cause)
        if self._order.fail_on_failure:
            raise ApplicationError(
                f"row {self._order.key.cursor} · completion {completion} failed, and "
                f"on_any_rollout_failure is 'fail': {text}",
                type=ROLLOUT_FAILED,
            )
        return RolloutOutcome(completion=completion, status="failed", error=text[:MAX_ERROR])

    async def _rollout(self, completion: int) -> RolloutOutcome:
        order = self._order
        return await workflow.execute_activity_method(
            RolloutActivities.rollout,
            RolloutOrder(
                run=order.run, group=order.key, completion=completion, version=order.version
            ),
            task_queue=ROLLOUT_QUEUE,
            start_to_close_timeout=timedelta(seconds=order.rollout_timeout) + OVERTIME,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            # Retries are decided here, where a lost worker can be told from a failed rollout.
            retry_policy=RetryPolicy(maximum_attempts=1),
            summary=f"row {order.key.text} · completion {completion} · policy v{order.version}",
        )

    async def _complete_group(self) -> GroupReport:
        order = self._order
        summary = await workflow.execute_activity_method(
            RolloutActivities.complete_group,
            CompleteGroup.of(order.run, order.key, order.version, self._outcomes, order.last),
            task_queue=ROLLOUT_QUEUE,
            start_to_close_timeout=timedelta(minutes=5),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            summary=f"row {order.key.text} · complete group",
        )
        statuses = [outcome.status for outcome in self._outcomes]
        return GroupReport(
            key=order.key,
            version=order.version,
            fate=summary.fate,
            survivors=summary.survivors,
            datums=summary.datums,
            reward_sum=summary.reward_sum,
            drops=len(statuses) - summary.survivors,
            reused=sum(outcome.reused for outcome in self._outcomes),
            failures=[status == "failed" for status in statuses if status != "dropped"],
        )

    async def _release(self) -> None:
        """Tell the run how many calls have ended, a few at a time.

        A row is admitted when G calls are free, so that a third of a group is fine enough, and
        three events each in the run's history are not too many. The last ones are released by
        the group's report.
        """
        ended = len(self._outcomes)
        quantum = math.ceil(self._order.completions / 3)
        due = ended - self._reported >= quantum and ended < self._order.completions
        if self._order.report_releases and due:
            self._reported = ended
            await self._signal("released", Released(key=self._order.key, total=ended))

    async def _report(self, report: GroupReport) -> None:
        # Shielded: also a cancelled group reports, or its run would wait for it.
        await asyncio.shield(asyncio.create_task(self._signal("group_finished", report)))

    async def _signal(self, name: str, message: Released | GroupReport) -> None:
        handle = workflow.get_external_workflow_handle(self._order.run.id)
        try:
            await handle.signal(name, message)
        except ApplicationError as error:
            # The run is gone for good; there is nobody left to tell.
            workflow.logger.info("run %s can't be reached: %s", self._order.run.id, error)


def _kind(error: ActivityError) -> str | None:
    """RECOVERABLE, or the name of a loss that says nothing about the task; None if fatal."""
    cause = error.cause
    if isinstance(cause, TimeoutError):
        return WORKER_LOST if cause.type == TimeoutType.HEARTBEAT else RECOVERABLE
    if isinstance(cause, CancelledError):
        return None
    if isinstance(cause, ApplicationError) and cause.type in (
        RECOVERABLE,
        SNAPSHOT_GONE,
        WORKER_SHUTDOWN,
        WORKER_UNFIT,
    ):
        return cause.type
    return None
