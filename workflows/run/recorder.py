"""The run's writer: ledger, commands and metrics, one write at a time.

Owns the order of writes, that they are retried forever (a full disk is waited for), and that
nothing is written to a folder that isn't the run's. Doesn't own what is written
(activities/records.py).
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
        Committed,
        CreateRun,
        FinishRun,
        RecordCommand,
        RecordEvaluation,
        RecordProducer,
        RunCreated,
        SkipGroup,
    )
    from everburn.records.commands import Command, Ending
    from everburn.records.ids import GroupKey
    from everburn.records.ledger import StepCommit
    from everburn.records.metrics import PRODUCER_STREAM, Record, Value
    from everburn.records.run_folder import Owner
    from workflows.queues import ORCHESTRATOR_QUEUE
    from workflows.run.state import RunState

TIMEOUT = timedelta(minutes=2)
HEARTBEAT_TIMEOUT = timedelta(seconds=4)
"""How long a dead writer delays its write: part of an orchestrator's recovery."""
CREATE_ATTEMPTS = RetryPolicy(maximum_attempts=3)
"""Then the run's status says why it has no folder yet."""
MAX_RECORDS = 48
"""Producer records that one payload carries; each has about 600 bytes."""


class Recorder:
    def __init__(self, state: RunState) -> None:
        self._run = state
        self._state = state.recorder
        self._turn = asyncio.Lock()
        self._owns_folder: bool | None = True if state.lease.grant is not None else None
        """None until the folder was created, or taken over."""

    @property
    def idle(self) -> bool:
        return not self._turn.locked()

    @property
    def owns_folder(self) -> bool:
        """Whether the run's folder is known to be this run's."""
        return bool(self._owns_folder)

    async def create_run(self, config: dict[str, object]) -> RunCreated:
        """Create the run's folder, or take it over.

        Raises:
            ActivityError: it can't be written now, or ever.
        """
        # Only the first execution of an incarnation gets here; a reset one has an id of its own.
        run = self._run
        order = CreateRun(
            run=run.run,
            config=config,
            owner=Owner(first_execution_id=workflow.info().run_id, incarnation=run.incarnation),
            at=workflow.time(),
            step=run.step.committed,
        )
        created: RunCreated = await self._execute(
            RecordContract.create_run, order, "create the run's folder", CREATE_ATTEMPTS
        )
        self._owns_folder = True
        return created

    def give_up(self) -> None:
        """Without a folder by now, the run gets none."""
        self._owns_folder = bool(self._owns_folder)

    def halt(self) -> None:
        """The execution was reset: it writes nothing."""
        self._owns_folder = False

    async def command(
        self,
        text: str,
        *,
        changes: dict[str, JsonValue] | None = None,
        checkpoint: str | None = None,
        ending: Ending | None = None,
    ) -> None:
        """Record a command, a saved state or the run's ending; returns once it is written."""
        run, state = self._run, self._state
        at, step = workflow.time(), run.step.committed
        await workflow.wait_condition(lambda: self._owns_folder is not None)
        async with self._turn:
            if not self._owns_folder:
                return
            command = Command(
                at=at,
                text=text,
                incarnation=run.incarnation,
                number=state.next_command,
                step=step,
                changes=changes or {},
                checkpoint=checkpoint,
                ending=ending,
            )
            order = RecordCommand(run=run.run, command=command)
            try:
                await self._do(RecordContract.record_command, order, f"record: {text[:80]}")
            except (Exception, asyncio.CancelledError) as error:
                if is_cancelled_exception(error):
                    # It may be written all the same: its number isn't used again.
                    state.next_command += 1
                raise
            state.next_command += 1

    @property
    def uncommitted_commands(self) -> tuple[int, int]:
        """The numbers, start and stop, of written commands that no commit has taken."""
        return self._state.committed_commands, self._state.next_command

    async def commit(self, step: StepCommit) -> Committed:
        """Append a step to the ledger, with its commands and the producer's records."""
        committed: Committed = await self._execute(
            RecordContract.commit_step, step, f"step {step.step} · commit to the ledger"
        )
        self._state.committed_commands = step.command_range[1]
        return committed

    async def skip_group(self, group: GroupKey, version: int) -> None:
        await self._execute(
            RecordContract.skip_group,
            SkipGroup(run=self._run.run, group=group, version=version),
            f"row {group.text} is skipped",
        )

    async def carry_publication(self, version: int) -> None:
        await self._execute(
            RecordContract.carry_publication,
            CarryPublication(run=self._run.run, version=version),
            f"policy v{version} is served by v{version - 1}'s snapshot",
        )

    async def record_evaluation(self, version: int, metrics: dict[str, float]) -> None:
        order = RecordEvaluation(run=self._run.run, version=version, metrics=metrics)
        await self._execute(
            RecordContract.record_evaluation, order, f"evaluation of policy v{version}"
        )

    def add_producer_record(self, values: dict[str, Value]) -> None:
        """Add a record to the producer stream; names get the prefix `producer/`."""
        state = self._state
        named = {f"producer/{name}": value for name, value in values.items()}
        record = Record(stream=PRODUCER_STREAM, index=state.producer_index, values=named)
        state.producer_records.append(record)
        state.producer_index += 1

    @property
    def has_many_records(self) -> bool:
        """Whether the producer's records fill a payload."""
        return len(self._state.producer_records) >= MAX_RECORDS

    def take_producer_records(self) -> list[Record]:
        """The first records that wait to be written; the caller writes them."""
        records = self._state.producer_records[:MAX_RECORDS]
        del self._state.producer_records[: len(records)]
        return records

    async def flush_producer_records(self) -> None:
        """Write the records that wait, if the run has a folder."""
        while self._state.producer_records and self.owns_folder:
            order = RecordProducer(run=self._run.run, records=self.take_producer_records())
            await self._execute(RecordContract.record_producer, order, "producer metrics")

    async def finish(self, save_seconds: dict[int, float]) -> None:
        """Write the evaluations before and after, and the durations of the last saves."""
        if not self.owns_folder:
            return
        admission = self._run.producer.admission
        order = FinishRun(
            run=self._run.run,
            initial_version=admission.initial_version,
            final_version=admission.version,
            save_seconds=save_seconds,
        )
        await self._execute(RecordContract.finish_run, order, "before and after")

    async def count_sandboxes(self) -> int:
        count: int = await self._execute(
            RecordContract.count_sandboxes, self._run.run, "what rollouts left behind"
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
