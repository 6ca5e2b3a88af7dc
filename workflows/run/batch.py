"""The batch of a step: collected from accepted groups, and submitted as they become ready.

Owns the submissions of one step in this execution, and what an earlier execution has sent. Doesn't
own the rest of the step (step.py).
"""

import asyncio
from typing import Literal

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.contracts import LeaseContract
    from activities.messages import PrepareBatch, SubmitGroups, Submitted
    from everburn.records.ids import GroupKey, group_ranges, in_order
    from everburn.records.ledger import PreparedBatch
    from workflows.run.parts import RunParts
    from workflows.run.session import consume_error
    from workflows.run.state import Sent
    from workflows.run.step_metrics import TrainerTime

LONG_STEP = 6_000
"""Events after which the batch is collected further in another execution: rejected rows fill a
history that no step ends. The next execution requests the results of earlier submissions again, so
continue-as-new normally happens between steps (train_run.py), at half as many events."""
MAX_SHOWN = 200
"""Characters of group names in an activity's summary."""

Collected = Literal["sent", "none", "open"]
"""none: no step, because the rows are done, or the run stops. open: another execution continues to
collect the batch."""


class OpenBatch:
    def __init__(self, parts: RunParts, step: int) -> None:
        self._parts = parts
        self._state = parts.state
        self._step = step
        self.prepared: PreparedBatch | None = None
        """For a run with `prepare_batch`, once the batch is sealed."""
        self.prepare_seconds: float | None = None
        self.trainer_time = TrainerTime(parts.state.step.sent)
        self._submissions: list[list[GroupKey]] = []
        """Those of this execution."""
        self._pending: list[asyncio.Task[Submitted]] = []

    @property
    def submission_count(self) -> int:
        return len(self._state.step.sent.submissions) + len(self._submissions)

    async def collect(self) -> Collected:
        """Submit every group of the batch as soon as it is ready, until all are submitted.

        Raises:
            LeaseFailedError, ActivityError, ApplicationError: as OptimizerStep.run.
        """
        state, producer = self._state, self._state.producer
        while True:
            missing = producer.queue.batch_size - len(producer.queue.batch)
            self._enter("collecting", f"{missing} more prompt groups")
            await workflow.wait_condition(self._can_continue)
            self._parts.trainer.check()
            if (refusal := self._refusal()) is not None:
                raise refusal
            if state.checkpoints.requested:
                # Gradients don't change weights: they are still those of the last committed step.
                self._enter("saving", "the requested checkpoint")
                await self._parts.checkpoints.save_requested()
                continue
            if not producer.batch_sealed:
                # After sealing, a fatal error belongs to a later batch: this one is finished, so
                # that trainer and sampler don't diverge.
                await self._parts.producer.settle_fatal()
                if producer.rows_done or state.stopping:
                    return "none"
                if self._is_long():
                    if self._sending():
                        await workflow.wait_condition(lambda: not self._sending())
                        continue
                    self._carry()
                    return "open"
            if self._ready():
                if self._parts.config.prepare_batch is not None and self.prepared is None:
                    await self._prepare()
                self._submit()
            elif producer.batch_sealed:
                return "sent"

    async def gradients(self) -> list[Submitted]:
        """The results of all submissions. Those of earlier executions are requested again: the
        lease's holder has them, and sends nothing twice."""
        self._enter("training", "gradients")
        earlier = [
            asyncio.create_task(self._forward_backward(submission, groups))
            for submission, groups in enumerate(self._state.step.sent.submissions)
        ]
        self._pending = [*earlier, *self._pending]
        try:
            return await asyncio.gather(*self._pending)
        except (Exception, asyncio.CancelledError):
            for task in self._pending:
                task.cancel()
            raise

    def _enter(self, phase: str, waiting_for: str) -> None:
        self._state.enter(f"step {self._step}: {phase}", waiting_for)

    def _can_continue(self) -> bool:
        state = self._state
        interrupted = state.fatal is not None or self._parts.trainer.ended or state.stopping
        interrupted = interrupted or state.checkpoints.requested or self._refusal() is not None
        done = state.producer.rows_done or state.producer.batch_sealed
        return interrupted or done or self._ready() or self._is_long()

    def _is_long(self) -> bool:
        return workflow.info().get_current_history_length() > LONG_STEP

    def _ready(self) -> bool:
        if self._parts.config.submits_whole_batches and not self._state.producer.batch_sealed:
            return False
        return self._state.producer.queue.ready > 0

    def _refusal(self) -> BaseException | None:
        """The error of a failed submission, if there is one."""
        ended = (task for task in self._pending if task.done() and not task.cancelled())
        return next((error for task in ended if (error := task.exception())), None)

    async def _prepare(self) -> None:
        """Compute the advantages of the sealed batch, before anything is sent."""
        self._enter("training", "prepare_batch")
        started = workflow.time()
        groups = in_order(group.key for group in self._state.producer.queue.batch)
        self.prepared = await self._parts.trainer.run(
            LeaseContract.prepare_batch,
            PrepareBatch(lease=self._parts.trainer.ref, step=self._step, groups=groups),
            f"step {self._step} · prepare the batch · {_rows(groups)}",
        )
        self.prepare_seconds = workflow.time() - started

    def _submit(self) -> None:
        """One request with all groups that are ready; several may be pending."""
        taken = self._state.producer.queue.take_submission()
        if self.prepared is None:
            trained = {group.key for group in taken if group.datums}
        else:
            trained = {group.key for group in taken} & set(self.prepared.groups)
        if not trained:
            return
        groups = in_order(trained)
        task = asyncio.create_task(self._timed_submission(self.submission_count, groups))
        # A step that ends with its lease doesn't await what is pending.
        task.add_done_callback(consume_error)
        self._submissions.append(groups)
        self._pending.append(task)

    async def _timed_submission(self, submission: int, groups: list[GroupKey]) -> Submitted:
        with self.trainer_time.measured():
            return await self._forward_backward(submission, groups)

    async def _forward_backward(self, submission: int, groups: list[GroupKey]) -> Submitted:
        order = SubmitGroups(
            lease=self._parts.trainer.ref,
            step=self._step,
            submission=submission,
            groups=groups,
            prepared=self.prepared,
        )
        result: Submitted = await self._parts.trainer.run(
            LeaseContract.forward_backward,
            order,
            f"step {self._step} · submission {submission} · {_rows(groups)}",
        )
        return result

    def _sending(self) -> bool:
        return not self._parts.trainer.ended and any(not task.done() for task in self._pending)

    def _carry(self) -> None:
        """Leave what was sent to the next execution."""
        step, time = self._state.step, self.trainer_time
        step.sent = Sent(
            submissions=[*step.sent.submissions, *self._submissions],
            since=time.since,
            busy=time.busy,
        )


def _rows(groups: list[GroupKey]) -> str:
    ranges = group_ranges(groups)
    return f"rows {ranges}" if len(ranges) <= MAX_SHOWN else f"rows {ranges[:MAX_SHOWN]}…"
