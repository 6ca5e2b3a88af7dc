"""PromptGroup: all completions of one row, from fan-out to the group's report.

Owns the fan-out and the group's single report. Doesn't own when a completion is tried again
(retries.py), admission, or what a fate means for the run: that is its parent's, which it reaches
by signals to the run's workflow id.
"""

import asyncio
import math
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.contracts import LOAD_TIMEOUT, ReconciliationContract, RolloutContract
    from activities.failure_types import message_of
    from activities.messages import CompleteGroup, RolloutOrder, RunLife
    from everburn.records.ids import RolloutOutcome
    from workflows.children.retries import ONCE, AttemptsUsedUpError, in_attempts
    from workflows.messages import ROLLOUT_FAILED, GroupOrder, GroupReport, Released
    from workflows.queues import ORCHESTRATOR_QUEUE, ROLLOUT_QUEUE

HEARTBEAT_TIMEOUT = timedelta(seconds=6)
"""How long a rollout worker can be dead before its work is given to others, and thrice how long
a cancelled call runs on. Each beat costs the server 0.4 ms."""
OVERTIME = timedelta(minutes=3)
"""Of an attempt, beyond user code and who blocks: the store, what is to be reaped, some grace."""
MAX_ERROR = 120
"""Characters of a failure kept per completion."""


def completion_limit(rollout_timeout: float) -> timedelta:
    """How long an attempt at a completion may take before it is given up from outside, and counts.

    Its worker must be the first to know: where code blocks for ever, it tells whose that is, while
    the server gives up whatever runs there. Code may begin to block as its deadline ends, counted
    from when all is loaded; and the worker waits for as long again.
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
        key, version = self._order.key, self._order.version
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
                failed=1,
            )

    async def _cancel_if_orphaned(self, work: "asyncio.Task[GroupReport]") -> None:
        """A terminated run can't cancel its groups: they look for it themselves, ever more rarely,
        since each look costs events. Resumed meanwhile, it has others."""
        for wait in (60, 120, 240, *[600] * 1000):
            await workflow.sleep(wait, summary="does the run still exist?")
            is_open = await workflow.execute_activity_method(
                ReconciliationContract.run_is_open,
                RunLife(run=self._order.run, life=self._order.key.life),
                task_queue=ORCHESTRATOR_QUEUE,
                start_to_close_timeout=timedelta(minutes=1),
                summary="does the run still exist?",
            )
            if not is_open:
                workflow.logger.warning("run %s is gone; its work is cancelled", self._order.run.id)
                work.cancel()
                return

    async def _complete(self, completion: int) -> None:
        """One completion to its terminal record, through retries. Raises what is fatal, unless any
        failure is, and all are counted."""
        try:
            outcome = await in_attempts(
                f"completion {completion}", lambda tries: self._rollout(completion, tries)
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
                key=self._order.key,
                version=self._order.version,
                fate="fatal",
                error=text,
                error_type=kind,
                completion=completion,
            )
        return RolloutOutcome(completion=completion, status="failed", error=text[:MAX_ERROR])

    async def _rollout(self, completion: int, tries: int) -> RolloutOutcome:
        order = self._order
        outcome: RolloutOutcome = await workflow.execute_activity_method(
            RolloutContract.rollout,
            RolloutOrder(
                run=order.run,
                group=order.key,
                completion=completion,
                version=order.version,
                tries=tries,
            ),
            task_queue=ROLLOUT_QUEUE,
            start_to_close_timeout=completion_limit(order.rollout_timeout),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            retry_policy=ONCE,
            summary=f"row {order.key.text} · completion {completion} · policy v{order.version}",
        )
        return outcome

    async def _complete_group(self) -> GroupReport:
        order = self._order
        summary = await workflow.execute_activity_method(
            RolloutContract.complete_group,
            CompleteGroup.of(order.run, order.key, order.version, self._outcomes, order.last),
            task_queue=ROLLOUT_QUEUE,
            start_to_close_timeout=timedelta(minutes=5),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            summary=f"row {order.key.text} · complete group",
        )
        statuses = [outcome.status for outcome in self._outcomes]
        first = self._first_failure
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
            error=None if first is None else self._said(first),
            completion=None if first is None else first.completion,
        )

    def _said(self, failure: GroupReport) -> str:
        """What fits beside the rest of a group's report, to a run that knows its own id."""
        return (failure.error or "").removeprefix(f"run {self._order.run.id} · ")[:MAX_ERROR]

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
