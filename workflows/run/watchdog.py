"""The watchdog: checks now and then whether what the run waits for still exists.

Owns the rhythm, and the reaction: a group whose report was lost is taken from the store, a dead
child is replaced, and a stalled run says what it waits for. Doesn't own the check itself
(activities/reconciliation.py).
"""

import contextlib
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.contracts import ReconciliationContract
    from activities.messages import Reconcile, Reconciled
    from everburn.records.ids import GroupKey
    from workflows.messages import EvaluationReport, GroupReport
    from workflows.queues import ORCHESTRATOR_QUEUE
    from workflows.run.parts import RunParts

INTERVAL = 30.0
"""Seconds between checks; each costs a dozen events of history."""
CHECK_ANYWAY = 300.0
"""Maximum seconds between checks of a run that progresses: a lost signal is one among many, and an
execution that continues another isn't notified of the deaths of its children."""
CHECK_TIMEOUT = timedelta(minutes=5)
"""With all attempts: an unreadable store, or manifest, must not end the checks."""
LONGEST_PAUSE = 3600.0
"""Seconds between checks of a run that has stalled for hours: held, or without capacity. Checks
fill a history that only steps can end."""


class Watchdog:
    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._state = parts.state
        self._noted = 0.0
        """The stall that a note tells of, by its beginning."""
        self._has_checked = False
        """Whether this execution has completed a check."""
        self.checking = False

    async def watch(self) -> None:
        """Check forever: at intervals, and as soon as a group has ended without a report."""
        await self._rest(min(INTERVAL, self._until_check_anyway()))
        while True:
            closed = self._parts.producer.take_closed()
            self.checking = True
            try:
                if closed:
                    await self._reconcile(closed)
                elif self._is_due():
                    await self._check()
            except ActivityError as error:
                # The store can't be read: the parts that need it say so.
                workflow.logger.warning("couldn't check the run: %s", error.cause)
                self._has_checked = False
            finally:
                self.checking = False
            await self._rest(self._pause())

    def _pause(self) -> float:
        """Seconds to the next check: more while nothing moves."""
        quiet = workflow.time() - self._state.progress_at
        return min(max(INTERVAL, quiet / 4), LONGEST_PAUSE)

    def _until_check_anyway(self) -> float:
        """Seconds, counted from the last check of any execution."""
        return max(0.0, self._state.checked_at + CHECK_ANYWAY - workflow.time())

    async def _rest(self, pause: float) -> None:
        """Sleep for `pause`; wake up if a group has closed, or a long pause sees progress."""
        since = self._state.progress_at
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: (
                    self._parts.producer.has_closed
                    or (pause > INTERVAL and self._state.progress_at != since)
                ),
                timeout=pause,
                timeout_summary="watchdog",
            )

    def _is_due(self) -> bool:
        """Soon if nothing moves: progress shows that most reports arrive."""
        quiet = workflow.time() - self._state.progress_at >= INTERVAL
        return quiet or not self._has_checked or not self._until_check_anyway()

    async def _check(self) -> None:
        self._has_checked, self._state.checked_at = True, workflow.time()
        self._note_stall()
        await self._reconcile(self._parts.producer.groups_out)
        recorder = self._parts.recorder
        if recorder.idle and (self._stall or recorder.has_many_records):
            await recorder.flush_producer_records()

    async def _reconcile(self, groups: list[GroupKey]) -> None:
        """Check some groups, the lease and the evaluation."""
        state, producer = self._state, self._parts.producer
        trainer, evaluations = self._parts.trainer, self._parts.evaluations
        lease, evaluation = trainer.awaited_id, evaluations.awaited_id
        found: Reconciled = await workflow.execute_activity_method(
            ReconciliationContract.reconcile,
            Reconcile(run=state.run, groups=groups, lease=lease, evaluation=evaluation),
            task_queue=ORCHESTRATOR_QUEUE,
            start_to_close_timeout=timedelta(minutes=2),
            schedule_to_close_timeout=CHECK_TIMEOUT,
            heartbeat_timeout=timedelta(seconds=10),
            summary=f"check {len(groups)} groups",
        )
        for result in found.finished:
            producer.on_group_finished(GroupReport(result=result))
        for key in found.dead:
            producer.on_group_dead(key)
        # Meanwhile these may have reported, or others may have followed.
        if found.lease_closed and lease == trainer.awaited_id:
            trainer.on_closed()
        if found.evaluation_closed and evaluation == evaluations.awaited_id:
            assert state.evaluation.running is not None
            report = EvaluationReport(
                version=state.evaluation.running,
                incarnation=state.incarnation,
                metrics={},
                error="its workflow ended without a report",
            )
            await evaluations.on_finished(report)

    @property
    def _stall(self) -> str:
        return self._state.stall(workflow.time())

    def _note_stall(self) -> None:
        """Note each stall once, and record it. This must not need the store, which may be what
        the run waits for."""
        if self._stall and self._noted != self._state.progress_at:
            self._noted = self._state.progress_at
            self._state.note(self._stall)
            self._parts.producer.record_sample(force=True)
