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
    from activities.failure_types import (
        LEASE_CLOSED,
        NO_RESOURCES,
        QUOTA,
        REJECTED,
        TRAINER_STATE_LOST,
        UNFIT,
        message_of,
    )
    from activities.messages import LoadCheckpoint, Publish, Published, ReplayStep
    from activities.trainer import TrainerActivities
    from everburn.records.ids import group_ranges
    from workflows.run.evaluations import Evaluations
    from workflows.run.live_config import Settings
    from workflows.run.producer import Producer
    from workflows.run.session import LeaseLostError, TrainerSession
    from workflows.run.state import CheckpointAt, Fatal, RunState

MAX_LOSSES = 3
"""Losses at one step, after which the step itself is suspected: a datum may be the killer."""
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
        self._state.losses += 1
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
            if self._suspects_step(loss) or self.takes_for_fatal(loss):
                return "suspected"
            state.phase = f"recovering from a lost lease ({loss})"
            try:
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
                    state.losses += 1
        self._note_left_out()
        return "unwanted"

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

    def _suspects_step(self, loss: LeaseLostError) -> bool:
        """Make it the run's fatal error that its trainer is lost again and again; whether it has
        been, by now. After a resume counting begins anew."""
        state = self._state
        if state.losses < MAX_LOSSES:
            return False
        groups = group_ranges([group.key for group in state.queue.batch])
        if loss.kind == NO_CHECKPOINT:
            # It never came to the step.
            fatal = Fatal(error=f"{loss}: see the run's notes", error_type=NO_CHECKPOINT)
        else:
            fatal = Fatal(
                error=f"step {state.step + 1} lost its trainer {state.losses} times; its rows are "
                f"{groups or 'not yet complete'}; the last loss: {loss}",
                error_type="StepKillsTrainer",
            )
        state.fatal = state.fatal or fatal
        state.losses = 0
        return True

    def takes_for_fatal(self, loss: LeaseLostError) -> bool:
        """Make a loss the run's fatal error where no other lease is to be had before a person has
        mended its cause; whether that is so. After a resume another lease is tried."""
        state = self._state
        if loss.kind not in {*LEASE_CLOSED, REJECTED, UNFIT, NO_RESOURCES}:
            return False
        state.fatal = state.fatal or Fatal(
            error=str(loss), error_type=loss.kind, holds=loss.kind == QUOTA
        )
        if state.lease_end is not None:
            state.lease_end = state.lease_end.model_copy(update={"error_type": TRAINER_STATE_LOST})
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
            TrainerActivities.replay_step,
            ReplayStep(lease=self._trainer.ref, step=step),
            f"replay step {step}",
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
                    TrainerActivities.load_checkpoint, order, f"load {checkpoint.path}"
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
            TrainerActivities.publish,
            Publish(lease=self._trainer.ref, version=version, current=current),
            f"publish policy v{version} again{why}",
        )
        self._state.progressed(workflow.time())
        return published


def backoff(attempts: int) -> int:
    """Seconds before the next attempt to get a session, after so many."""
    return BACKOFF[min(attempts, len(BACKOFF) - 1)]


def remember(state: RunState, checkpoint: CheckpointAt) -> None:
    """A checkpoint is eligible from now on; the first and the last few are kept in mind."""
    state.checkpoints = [*state.checkpoints[:1], *state.checkpoints[1:][-2:], checkpoint]
