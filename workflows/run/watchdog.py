"""The watchdog: looks, now and then, whether what the run waits for still exists.

Owns the rhythm and what follows from what is found: a group whose report was lost is taken in, a
dead child is replaced, and a run in which nothing moves says what it waits for. Doesn't own the
looking itself (activities/reconciliation.py).
"""

import contextlib
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.contracts import MAX_FINISHED, ReconciliationContract
    from activities.messages import Reconcile, Reconciled
    from everburn.records.ids import GroupKey, decode_groups, encode_groups
    from workflows.messages import EvaluationReport, GroupReport
    from workflows.queues import ORCHESTRATOR_QUEUE
    from workflows.run.evaluations import Evaluations
    from workflows.run.producer import Producer
    from workflows.run.recorder import Recorder
    from workflows.run.session import TrainerSession
    from workflows.run.state import RunState

INTERVAL = 30.0
"""Seconds between looks; each costs a dozen events of history."""
LOOK_ANYWAY = 300.0
"""Seconds between looks however much moves: what is lost is lost among others, and nobody tells an
execution that continues another of its children's deaths."""
LONGEST_LOOK = timedelta(minutes=5)
"""With all attempts: a store that can't be read, or a manifest in it, must not end the looking."""
LONGEST_PAUSE = 3600.0
"""Seconds between looks at a run that has stood still for hours: held, or without capacity. Looks
fill a history that only steps can end."""
GROUPS_PER_LOOK = 150
"""Groups whose names fit into one payload."""


class Watchdog:
    def __init__(
        self,
        state: RunState,
        producer: Producer,
        trainer: TrainerSession,
        evaluations: Evaluations,
        recorder: Recorder,
    ) -> None:
        self._state = state
        self._producer = producer
        self._trainer = trainer
        self._evaluations = evaluations
        self._recorder = recorder
        self._told = 0.0
        """The standstill that a person has been told of, by its beginning."""
        self._has_looked = False
        """Whether it has, in this execution."""
        self.looking = False

    async def watch(self) -> None:
        """Look every now and then, and as soon as a group has ended without a report, for ever."""
        await self._rest(min(INTERVAL, self._until_look_anyway()))
        while True:
            closed = self._producer.take_closed()
            self.looking = True
            try:
                if closed:
                    await self._look_in_turn(closed, MAX_FINISHED)
                elif self._is_due():
                    await self._look()
            except ActivityError as error:
                # The store can't be read: whoever needs it says so, and the next look is soon.
                workflow.logger.warning("couldn't look after the run: %s", error.cause)
                self._has_looked = False
            finally:
                self.looking = False
            await self._rest(self._pause())

    def _pause(self) -> float:
        """Seconds to the next look: ever more while nothing moves."""
        quiet = workflow.time() - self._state.progress_at
        return min(max(INTERVAL, quiet / 4), LONGEST_PAUSE)

    def _until_look_anyway(self) -> float:
        """Seconds; by the looks of earlier executions, too, which may each have been too short for
        one."""
        now = workflow.time()
        looked_at = now if self._state.looked_at is None else self._state.looked_at
        return max(0.0, looked_at + LOOK_ANYWAY - now)

    async def _rest(self, pause: float) -> None:
        """Until then, or until a group has closed; a long pause ends once anything moves."""
        since = self._state.progress_at
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: (
                    self._producer.has_closed
                    or (pause > INTERVAL and self._state.progress_at != since)
                ),
                timeout=pause,
                timeout_summary="watchdog",
            )

    def _is_due(self) -> bool:
        """Soon where nothing moves: as long as it does, most reports evidently arrive."""
        quiet = workflow.time() - self._state.progress_at >= INTERVAL
        return quiet or not self._has_looked or not self._until_look_anyway()

    async def _look(self) -> None:
        self._has_looked, self._state.looked_at = True, workflow.time()
        self._note_standstill()
        await self._look_in_turn(self._producer.groups_out, GROUPS_PER_LOOK)
        if self._standstill and self._recorder.idle:
            await self._recorder.flush_producer_samples()

    async def _look_in_turn(self, groups: list[GroupKey], at_once: int) -> None:
        for start in range(0, max(1, len(groups)), at_once):
            await self._look_after(groups[start : start + at_once])

    async def _look_after(self, groups: list[GroupKey]) -> None:
        """Look for some groups, for the lease and for the evaluation."""
        state = self._state
        lease, evaluation = self._trainer.awaited_id, self._evaluations.awaited_id
        found: Reconciled = await workflow.execute_activity_method(
            ReconciliationContract.reconcile,
            Reconcile(
                run=state.run,
                groups=encode_groups(groups),
                lease=lease,
                evaluation=evaluation,
            ),
            task_queue=ORCHESTRATOR_QUEUE,
            start_to_close_timeout=timedelta(minutes=2),
            schedule_to_close_timeout=LONGEST_LOOK,
            heartbeat_timeout=timedelta(seconds=10),
            summary=f"look after {len(groups)} groups",
        )
        for group in found.finished:
            self._producer.on_group_finished(
                GroupReport(
                    key=group.key,
                    version=group.version,
                    fate=group.fate,
                    survivors=group.survivors,
                    datums=group.datums,
                    reward_sum=group.reward_sum,
                )
            )
        for key in decode_groups(found.dead):
            self._producer.on_group_dead(key)
        # Others may have followed meanwhile, or these have reported.
        if found.lease_closed and lease == self._trainer.awaited_id:
            self._trainer.on_closed()
        if found.evaluation_closed and evaluation == self._evaluations.awaited_id:
            assert state.evaluating is not None
            report = EvaluationReport(
                version=state.evaluating, metrics={}, error="its workflow ended without a report"
            )
            await self._evaluations.on_finished(report)

    @property
    def _standstill(self) -> str:
        return self._state.standstill(workflow.time())

    def _note_standstill(self) -> None:
        """What stays of a standstill: a note, and a metrics record. It must not take the store,
        which may be what the run waits for."""
        if self._standstill and self._told != self._state.progress_at:
            self._told = self._state.progress_at
            self._state.note(self._standstill)
            self._producer.record_sample(force=True)
