"""The run's writer: every change of ledger and metrics, one at a time.

Owns the order of writes and how long they are retried (for ever: a full disk is waited for), and
that nothing is written to a folder that isn't the run's.
Doesn't own what is written (activities/records.py).
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pydantic import JsonValue
from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.contracts import RecordContract
    from activities.messages import (
        CarryPublication,
        CommitStep,
        Committed,
        CreateRun,
        FinishRun,
        RecordControl,
        RecordEvaluation,
        RecordProducer,
        RunCreated,
        SkipGroup,
    )
    from everburn.records.commands import Control, Ending
    from everburn.records.ids import GroupKey
    from everburn.records.run_folder import Owner
    from workflows.queues import ORCHESTRATOR_QUEUE
    from workflows.run.state import RunState

TIMEOUT = timedelta(minutes=2)
HEARTBEAT_TIMEOUT = timedelta(seconds=4)
"""How long a writer can be dead before its write is done again: part of an orchestrator's recovery,
and cheap, since writes are short."""
CREATE_ATTEMPTS = RetryPolicy(maximum_attempts=3)
"""Then a person is told why the run has no folder yet."""
MAX_WHAT = 500
"""Characters of what is kept of a control."""
MAX_SAMPLES = 6
"""Producer samples that fit into one payload of their own."""
MAX_SAMPLES_BESIDE = 2
"""Those that fit beside a step's record."""


class Recorder:
    def __init__(self, state: RunState) -> None:
        self._state = state
        self._turn = asyncio.Lock()
        self._owns_folder: bool | None = True if state.grant is not None else None
        """Known once the folder was made, or taken over."""

    @property
    def idle(self) -> bool:
        return not self._turn.locked()

    @property
    def owns_folder(self) -> bool:
        """Whether the run's folder is this run's, as far as is known."""
        return bool(self._owns_folder)

    async def create_run(self, config: dict[str, object]) -> RunCreated:
        """Make the run's folder, or take it over.

        Raises:
            ActivityError: it can't be written now, or never.
        """
        # Only the first execution of a chain gets here; a reset one has an id of its own.
        owner = Owner(chain=workflow.info().run_id, life=self._state.life)
        state = self._state
        order = CreateRun(
            run=state.run, config=config, owner=owner, at=workflow.time(), step=state.step
        )
        created: RunCreated = await self._execute(
            RecordContract.create_run, order, "create the run's folder", CREATE_ATTEMPTS
        )
        self._owns_folder = True
        return created

    def give_up(self) -> None:
        """Without a folder of its own by now, the run gets none any more."""
        self._owns_folder = bool(self._owns_folder)

    def halt(self) -> None:
        """The execution was reset: it has nothing to say."""
        self._owns_folder = False

    async def control(
        self,
        what: str,
        *,
        changes: dict[str, JsonValue] | None = None,
        checkpoint: str | None = None,
        ending: Ending | None = None,
    ) -> None:
        """Keep what the run was told, or what became of it; returns once it is written."""
        state, at = self._state, workflow.time()
        step = state.step
        await workflow.wait_condition(lambda: self._owns_folder is not None)
        async with self._turn:
            if not self._owns_folder:
                return
            control = Control(
                at=at,
                what=what[:MAX_WHAT],
                life=state.life,
                number=state.told,
                step=step,
                changes=changes or {},
                checkpoint=checkpoint,
                ending=ending,
            )
            order = RecordControl(run=state.run, control=control)
            try:
                await self._do(RecordContract.record_control, order, f"record: {what[:80]}")
            except (Exception, asyncio.CancelledError) as error:
                if is_cancelled_exception(error):
                    # It may be written all the same, and would stand for what comes after it.
                    state.told += 1
                raise
            # In a turn of its own: those before `told` are written.
            state.told += 1

    async def commit(self, order: CommitStep) -> Committed:
        committed: Committed = await self._execute(
            RecordContract.commit_step, order, f"step {order.step} · commit to the ledger"
        )
        return committed

    async def skip_group(self, group: GroupKey, version: int) -> None:
        await self._execute(
            RecordContract.skip_group,
            SkipGroup(run=self._state.run, group=group, version=version),
            f"row {group.text} is skipped",
        )

    async def carry_publication(self, version: int) -> None:
        await self._execute(
            RecordContract.carry_publication,
            CarryPublication(run=self._state.run, version=version),
            f"policy v{version} is served by v{version - 1}'s snapshot",
        )

    async def record_evaluation(self, version: int, metrics: dict[str, float]) -> None:
        order = RecordEvaluation(run=self._state.run, version=version, metrics=metrics)
        await self._execute(
            RecordContract.record_evaluation, order, f"evaluation of policy v{version}"
        )

    def take_producer_samples(self, limit: int = MAX_SAMPLES_BESIDE) -> list[Any]:
        """The first samples that wait to be written; the caller writes them."""
        samples = self._state.producer_samples[:limit]
        del self._state.producer_samples[: len(samples)]
        return samples

    async def flush_producer_samples(self) -> None:
        """Write what waits; nothing without a folder."""
        while self._state.producer_samples and self.owns_folder:
            order = RecordProducer(
                run=self._state.run, samples=self.take_producer_samples(MAX_SAMPLES)
            )
            await self._execute(RecordContract.record_producer, order, "producer metrics")

    async def finish(self, initial_version: int, final_version: int) -> None:
        if not self.owns_folder:
            return
        order = FinishRun(
            run=self._state.run,
            initial_version=initial_version,
            final_version=final_version,
            save_seconds=self._state.save_seconds,
        )
        await self._execute(RecordContract.finish_run, order, "before and after")

    async def count_sandboxes(self) -> int:
        count: int = await self._execute(
            RecordContract.count_sandboxes, self._state.run, "what rollouts left behind"
        )
        return count

    async def _execute(
        self,
        activity: Callable[[Any, Any], Any],
        order: Any,
        summary: str,
        attempts: RetryPolicy | None = None,
    ) -> Any:
        async with self._turn:
            return await self._do(activity, order, summary, attempts)

    async def _do(
        self,
        activity: Callable[[Any, Any], Any],
        order: Any,
        summary: str,
        attempts: RetryPolicy | None = None,
    ) -> Any:
        return await workflow.execute_activity_method(
            activity,
            order,
            task_queue=ORCHESTRATOR_QUEUE,
            start_to_close_timeout=TIMEOUT,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            retry_policy=attempts,
            summary=summary,
        )
