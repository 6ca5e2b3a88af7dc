"""PromptGroup: all completions of one row, from fan-out to the group's report.

Owns the fan-out and the group's single report, a signal to the run's workflow id. Doesn't own when
a completion is retried (retries.py), admission, or what an outcome means for the run.
"""

import asyncio
import math
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.contracts import LOAD_TIMEOUT, ReconciliationContract, RolloutContract
    from activities.failure_types import message_of
    from activities.messages import CompleteGroup, RolloutOrder, RunIncarnation
    from everburn.records.ids import GroupOutcome, GroupResult, RolloutOutcome
    from workflows.children.retries import ONCE, AttemptsUsedUpError, in_attempts
    from workflows.messages import ROLLOUT_FAILED, GroupOrder, GroupReport, Released
    from workflows.queues import ORCHESTRATOR_QUEUE, ROLLOUT_QUEUE

HEARTBEAT_TIMEOUT = timedelta(seconds=6)
"""A rollout worker that is dead for so long loses its work to others; a cancelled call ends within
a third of it. Each heartbeat costs the server 0.4 ms."""
OVERTIME = timedelta(minutes=3)
"""Time per attempt in addition to user code and blocking: the store, sandboxes, some grace."""
MAX_ERRORS = 20_000
"""Characters of failures that one payload carries, in equal shares of a group's completions."""


def completion_limit(rollout_timeout: float) -> timedelta:
    """How long an attempt at a completion may take before the server gives it up as a failure.

    Longer than the worker waits, which can name the code that blocks forever. Code may begin to
    block at the end of its deadline, which begins once the code is loaded; the worker then waits
    for as long again.
    """
    return timedelta(seconds=LOAD_TIMEOUT + 2 * rollout_timeout) + OVERTIME


@workflow.defn
class PromptGroup:
    @workflow.init
    def __init__(self, order: GroupOrder) -> None:
        self._order = order
        self._outcomes: list[RolloutOutcome] = []
        self._first_failure: GroupReport | None = None
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
        completions = [
            asyncio.create_task(self._complete(index)) for index in range(self._order.completions)
        ]
        try:
            await asyncio.gather(*completions)
            if self._order.fail_on_failure and self._first_failure is not None:
                failed = sum(outcome.status == "failed" for outcome in self._outcomes)
                return self._first_failure.model_copy(update={"failed": failed})
            return await self._complete_group()
        except (Exception, asyncio.CancelledError) as error:
            for task in completions:
                task.cancel()
            if is_cancelled_exception(error):
                return GroupReport(result=self._without_manifest("cancelled"))
            if not isinstance(error, ActivityError | ApplicationError):
                raise
            cause = error.cause if isinstance(error, ActivityError) else error
            return GroupReport(
                result=self._without_manifest("fatal"),
                error=getattr(cause, "message", str(cause)),
                error_type=getattr(cause, "type", None) or type(cause).__name__,
                failed=1,
            )

    def _without_manifest(self, outcome: GroupOutcome) -> GroupResult:
        return GroupResult(key=self._order.key, version=self._order.version, outcome=outcome)

    async def _cancel_if_orphaned(self, work: "asyncio.Task[GroupReport]") -> None:
        """Cancel the work of a run that was terminated, or resumed as another incarnation. Checks
        become rarer, since each costs events."""
        for wait in (60, 120, 240, *[600] * 1000):
            await workflow.sleep(wait, summary="does the run still exist?")
            is_open = await workflow.execute_activity_method(
                ReconciliationContract.run_is_open,
                RunIncarnation(run=self._order.run, incarnation=self._order.key.incarnation),
                task_queue=ORCHESTRATOR_QUEUE,
                start_to_close_timeout=timedelta(minutes=1),
                summary="does the run still exist?",
            )
            if not is_open:
                workflow.logger.warning("run %s is gone; its work is cancelled", self._order.run.id)
                work.cancel()
                return

    async def _complete(self, completion: int) -> None:
        """One completion to its terminal record, through retries. Raises a fatal error, unless any
        failure is fatal and all are counted."""
        try:
            outcome = await in_attempts(
                f"completion {completion}", lambda retry: self._rollout(completion, retry)
            )
        except AttemptsUsedUpError as used_up:
            outcome = self._failed(completion, message_of(used_up.error), ROLLOUT_FAILED)
        except ActivityError as error:
            if not self._order.fail_on_failure or not isinstance(error.cause, ApplicationError):
                raise
            outcome = self._failed(completion, message_of(error), error.cause.type)
        self._outcomes.append(outcome)
        await self._release()

    def _failed(self, completion: int, text: str, kind: str | None) -> RolloutOutcome:
        if self._first_failure is None:
            self._first_failure = GroupReport(
                result=self._without_manifest("fatal"),
                error=text,
                error_type=kind,
                completion=completion,
            )
        share = MAX_ERRORS // self._order.completions
        return RolloutOutcome(completion=completion, status="failed", error=text[:share])

    async def _rollout(self, completion: int, retry: int) -> RolloutOutcome:
        order = self._order
        outcome: RolloutOutcome = await workflow.execute_activity_method(
            RolloutContract.rollout,
            RolloutOrder(
                run=order.run,
                group=order.key,
                completion=completion,
                version=order.version,
                retry=retry,
            ),
            task_queue=ROLLOUT_QUEUE,
            start_to_close_timeout=completion_limit(order.rollout_timeout),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            retry_policy=ONCE,
            summary=f"row {order.key.text} · completion {completion} · policy v{order.version}",
        )
        return outcome

    async def _complete_group(self) -> GroupReport:
        order, outcomes = self._order, self._outcomes
        result: GroupResult = await workflow.execute_activity_method(
            RolloutContract.complete_group,
            CompleteGroup(
                run=order.run,
                group=order.key,
                version=order.version,
                outcomes=sorted(outcomes, key=lambda outcome: outcome.completion),
                last=order.last,
            ),
            task_queue=ROLLOUT_QUEUE,
            start_to_close_timeout=timedelta(minutes=5),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            summary=f"row {order.key.text} · complete group",
        )
        first = self._first_failure
        return GroupReport(
            result=result,
            drops=len(outcomes) - result.survivors,
            reused=sum(outcome.reused for outcome in outcomes),
            failures=[each.status == "failed" for each in outcomes if each.status != "dropped"],
            error=None if first is None else first.error,
            completion=None if first is None else first.completion,
        )

    async def _release(self) -> None:
        """Report how many calls have ended, in thirds of a group.

        A row is admitted when G calls are free, so finer reports would only cost events in the
        run's history. The group's report releases the last ones.
        """
        ended = len(self._outcomes)
        quantum = math.ceil(self._order.completions / 3)
        due = ended - self._reported >= quantum and ended < self._order.completions
        if self._order.report_releases and due:
            self._reported = ended
            await self._signal("released", Released(key=self._order.key, total=ended))

    async def _report(self, report: GroupReport) -> None:
        # Shielded: a cancelled group reports too, since its run waits for that.
        await asyncio.shield(asyncio.create_task(self._signal("group_finished", report)))

    async def _signal(self, name: str, message: Released | GroupReport) -> None:
        handle = workflow.get_external_workflow_handle(self._order.run.id)
        try:
            await handle.signal(name, message)
        except ApplicationError as error:
            # The run is gone.
            workflow.logger.info("run %s can't be reached: %s", self._order.run.id, error)
