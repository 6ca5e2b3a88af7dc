"""Recovery: from a lost trainer session back to the state after the last committed step.

Owns the sequence: a new lease, the newest checkpoint that loads, the ledger's steps since, the
publications that rollouts need. No rollout is sampled again; the interrupted step is run again
from the groups in the queue. Doesn't own how the loss was noticed (session.py).
"""

import asyncio
import contextlib
from typing import Literal

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.contracts import LeaseContract
    from activities.failure_types import LEASE_CLOSED, FailureKind, message_of
    from activities.messages import LoadCheckpoint, Publish, Published, ReplayStep
    from everburn.records.ids import group_ranges
    from workflows.run.evaluations import Evaluations
    from workflows.run.live_config import Settings
    from workflows.run.producer import Producer
    from workflows.run.session import LeaseLostError, TrainerSession
    from workflows.run.state import CheckpointAt, Fatal, LeaseFailures, RunState

SAME_ANSWERS = 3
"""Leases in a row on which the service answered with the same failure, after which the step itself
is suspected: a datum may be the cause."""
INTERRUPTED = 10
"""Leases in a row that failed with an operation of one step in flight, after which the step is
suspected. Deaths of workers and servers come in series, so that is many."""
PAUSES = (0, 0, 1, 2, 5, 10, 20, 40, 60)
"""Seconds before the next lease, by how many in a row have failed."""
NO_CHECKPOINT = "NoCheckpoint"
STOP_PATIENCE = 120.0
"""Seconds that a run which is stopped waits for a session to save and evaluate with. Without one
nothing is lost: the ledger has its steps, and `everburn resume` replays them."""
BACKOFF = (1, 1, 2, 3, 5, 10, 30, 60, 120, 300)
"""Seconds between attempts to get a session."""

_Outcome = Literal["restored", "suspected", "unwanted"]


class Recovery:
    def __init__(
        self,
        state: RunState,
        settings: Settings,
        trainer: TrainerSession,
        producer: Producer,
        evaluations: Evaluations,
    ) -> None:
        self._state = state
        self._settings = settings
        self._evaluations = evaluations
        self._trainer = trainer
        self._producer = producer
        self._impatient = False
        """Whether a stopped run has waited for a session for long enough."""

    async def recover(self, loss: LeaseLostError) -> bool:
        """Restore the trainer after a loss; the run's fatal error is set where it can't be done.

        Admission is closed until weights and version are live again. Returns false if the run was
        stopped instead: while no session was to be had, with nothing left that needs one, or while
        it was held by what can't be restored.

        Raises:
            ApplicationError: it can't be restored, and the run doesn't hold.
        """
        started = workflow.time()
        self.count(loss)
        restored = await self.restore(loss)
        self._state.recovery_seconds += workflow.time() - started
        return restored and not await self._producer.settle_fatal()

    async def restore(self, loss: LeaseLostError) -> bool:
        """Bring a trainer to the state after the last committed step, whatever it takes."""
        state = self._state
        self._producer.open = False
        patience = asyncio.create_task(self._lose_patience())
        try:
            outcome = await self._until_restored(loss)
        finally:
            patience.cancel()
        if outcome == "unwanted":
            return False
        state.reused_rollouts += sum(group.n for group in state.queue.batch)
        state.restart_step()
        if outcome == "restored":
            self._producer.start()
        return True

    async def _until_restored(self, loss: LeaseLostError) -> _Outcome:
        """Try new leases until one holds, the step is suspected, or nobody needs one any more."""
        state = self._state
        attempts = 0
        await self._trainer.abandon(loss)
        while not self._unwanted():
            if self.suspects_step(loss) or self.takes_for_fatal(loss):
                return "suspected"
            state.phase = f"recovering from a lost lease ({loss})"
            try:
                await self.pause()
                await self._restore()
                return "restored"
            except LeaseLostError as error:
                # However it was lost: its weights aren't those of any step.
                await self._trainer.abandon(error)
                loss = error
                if state.grant is None:
                    # No session was to be had: that says nothing about the step.
                    state.waiting_for = f"a trainer session: {error}"
                    await self._pause(backoff(attempts))
                    attempts += 1
                else:
                    self.count(loss, recovering=True)
        self._note_left_out()
        return "unwanted"

    def count(self, loss: LeaseLostError, *, recovering: bool = False) -> None:
        """Count a failed lease. One that failed while no operation was in flight, and the run only
        collected, paused or evaluated, counts for nothing."""
        answer = str(loss) if loss.kind in (FailureKind.TRAINER_FAILED, NO_CHECKPOINT) else None
        in_flight = self._trainer.interrupted
        if recovering or in_flight or answer is not None:
            self._state.lease_failures.count(answer, in_flight=in_flight)

    async def pause(self) -> None:
        """Wait before the next lease, the longer the more have failed in a row."""
        failed = self._state.lease_failures.in_a_row
        seconds = PAUSES[min(failed, len(PAUSES) - 1)]
        if seconds:
            self._state.waiting_for = f"a pause of {seconds} s: {failed} leases in a row failed"
            await self._pause(seconds)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(self._unwanted, timeout=seconds)

    def _unwanted(self) -> bool:
        """Whether a session is of no use: the run stops, and nothing that is left to do needs
        one, or it has been waited for in vain."""
        return self._is_stopped() and (self._impatient or not self._left_to_do())

    def _left_to_do(self) -> list[str]:
        """What a run that stops would do with a session."""
        state, config = self._state, self._settings.config
        left = {
            "the final checkpoint": config.save_final_checkpoint and not state.saved,
            "the final evaluation": state.evaluating is not None
            or self._evaluations.wanted(state.admission.version),
            "the promotion": config.output_model_id is not None and state.model is None,
        }
        return [what for what, is_left in left.items() if is_left]

    def _is_stopped(self) -> bool:
        return self._state.stop and not self._state.drain

    def _note_left_out(self) -> None:
        left = self._left_to_do()
        if left:
            self._state.note(
                f"no trainer session was to be had for {' and '.join(left)}; the ledger has all "
                f"steps, and `everburn resume {self._state.run.id}` goes on from them"
            )

    async def _lose_patience(self) -> None:
        await workflow.wait_condition(self._is_stopped)
        await workflow.sleep(STOP_PATIENCE, summary="stopped, and no session to save in")
        self._impatient = True

    def suspects_step(self, loss: LeaseLostError) -> bool:
        """Whether the step is suspected of ending its leases; that is the run's fatal error then.
        After a resume counting starts at zero."""
        state = self._state
        failures = state.lease_failures
        if failures.answered < SAME_ANSWERS and failures.interrupted < INTERRUPTED:
            return False
        if loss.kind == NO_CHECKPOINT:
            # The leases ended before they reached the step.
            error, error_type = f"{loss}: see the run's notes", NO_CHECKPOINT
        else:
            how = (
                f"on {SAME_ANSWERS} leases in a row the service answered with the same failure"
                if failures.answered >= SAME_ANSWERS
                else f"{INTERRUPTED} leases in a row failed while its requests were in flight"
            )
            error, error_type = f"{self._suspect()}: {how}; the last: {loss}", "StepKillsTrainer"
        state.fatal = state.fatal or Fatal(error=error, error_type=error_type, infrastructure=True)
        state.lease_failures = LeaseFailures()
        return True

    def _suspect(self) -> str:
        state = self._state
        if not state.checkpoints:
            return "saving the initial state"
        if not state.queue.batch:
            return f"what follows step {state.step}"
        rows = group_ranges([group.key for group in state.queue.batch])
        return f"step {state.step + 1} (rows {rows})"

    def takes_for_fatal(self, loss: LeaseLostError) -> bool:
        """Make a loss the run's fatal error where no other lease is to be had before a person has
        mended its cause; whether that is so. After a resume another lease is tried."""
        state = self._state
        if loss.kind not in {
            *LEASE_CLOSED,
            FailureKind.REJECTED,
            FailureKind.UNFIT,
            FailureKind.NOT_PROVISIONED,
        }:
            return False
        state.fatal = state.fatal or Fatal(
            error=str(loss), error_type=loss.kind, holds=loss.kind == FailureKind.QUOTA
        )
        if state.lease_end is not None:
            state.lease_end = state.lease_end.model_copy(
                update={"error_type": FailureKind.TRAINER_STATE_LOST}
            )
        return True

    async def _restore(self) -> None:
        state = self._state
        state.waiting_for = "a trainer session"
        await self._trainer.acquire(self._unwanted)
        checkpoint = await self._load()
        for step in range(checkpoint, state.step + 1):
            if step > checkpoint:
                await self._replay(step)
            if step in self._versions_in_use():
                await self._publish(step, current=False)
        published = await self._publish(state.admission.version, current=True)
        state.snapshot = published.snapshot

    async def _replay(self, step: int) -> None:
        self._state.waiting_for = f"the replay of step {step} of {self._state.step}"
        await self._trainer.run(
            LeaseContract.replay_step,
            ReplayStep(lease=self._trainer.ref, step=step),
            f"replay step {step}",
            counts=False,
        )
        self._state.redone_steps += 1
        self._state.progressed(workflow.time())

    async def _load(self) -> int:
        """Load the newest checkpoint that loads; returns its step."""
        state = self._state
        for checkpoint in reversed(state.checkpoints):
            state.waiting_for = f"checkpoint {checkpoint.path}"
            order = LoadCheckpoint(
                lease=self._trainer.ref, step=checkpoint.step, path=checkpoint.path
            )
            try:
                await self._trainer.run(
                    LeaseContract.load_checkpoint,
                    order,
                    f"load {checkpoint.path}",
                    counts=False,
                )
                state.progressed(workflow.time())
                return checkpoint.step
            except ActivityError as error:
                cause = message_of(error)
                state.note(f"{checkpoint.path} doesn't load, an older one is tried: {cause}")
        raise LeaseLostError("no checkpoint of the run can be loaded", NO_CHECKPOINT)

    def _versions_in_use(self) -> set[int]:
        """Versions before the current one that rollouts in flight sample from."""
        current = self._state.admission.version
        return {out.version for out in self._state.out.values() if out.version != current}

    async def _publish(self, version: int, *, current: bool) -> Published:
        self._state.waiting_for = f"sampler weights of policy v{version}"
        why = "" if current else ", for rollouts that use it"
        published: Published = await self._trainer.run(
            LeaseContract.publish,
            Publish(lease=self._trainer.ref, version=version, current=current),
            f"publish policy v{version} again{why}",
            counts=False,
        )
        self._state.progressed(workflow.time())
        return published


def backoff(attempts: int) -> int:
    """Seconds before the next attempt to get a session, after so many."""
    return BACKOFF[min(attempts, len(BACKOFF) - 1)]


def remember(state: RunState, checkpoint: CheckpointAt) -> None:
    """A checkpoint is eligible from now on; the first and the last few are kept in mind."""
    state.checkpoints = [*state.checkpoints[:1], *state.checkpoints[1:][-2:], checkpoint]
