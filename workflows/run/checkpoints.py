"""Saving the trainer's state: the initial one, periodic, requested and final checkpoints.

Owns the names of attempts and which checkpoints recovery may start from. Doesn't own when a
checkpoint is due (start.py, step.py, shutdown.py).
"""

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.contracts import LeaseContract
    from activities.failure_types import message_of
    from activities.messages import SaveCheckpoint, Saved
    from workflows.run.session import LeaseFailedError, TrainerSession
    from workflows.run.state import RunState, SaveAttempts

SAVE_ATTEMPTS = 2
"""A service that fails to save twice in a row fails a third time; the next interval tries again."""


class Checkpoints:
    def __init__(self, state: RunState, trainer: TrainerSession) -> None:
        self._run = state
        self._state = state.checkpoints
        self._trainer = trainer

    async def save(self, step: int) -> Saved:
        """Save the trainer's state as `state-<step>`. Another attempt takes another name, since
        the failed one may have left something under its own.

        Raises:
            LeaseFailedError, ActivityError
        """
        attempt = self._next_attempt(step)
        name = f"state-{step}" if attempt == 1 else f"state-{step}-try-{attempt}"
        saved: Saved = await self._trainer.run(
            LeaseContract.save_checkpoint,
            SaveCheckpoint(
                lease=self._trainer.ref, step=step, version=self._run.version, name=name
            ),
            f"step {step} · checkpoint {name}",
        )
        self._state.note_saved(step, saved.path)
        return saved

    async def save_committed(self) -> str:
        """Save the last committed step, whose record is already written.

        Raises:
            LeaseFailedError, ActivityError
        """
        step = self._run.step.committed
        saved = await self.save(step)
        self._state.remember(step, saved.path)
        self._state.seconds[step] = saved.seconds
        return saved.path

    async def save_requested(self) -> None:
        """Save the last committed step for a person, unless it is saved.

        Raises:
            LeaseFailedError
        """
        error = None
        try:
            if not self._state.has(self._run.step.committed):
                await self.save_committed()
        except ActivityError as failure:
            error = message_of(failure)
        except LeaseFailedError:
            self._state.answer("the trainer was lost meanwhile; ask again")
            raise
        self._state.answer(error)

    async def save_periodic(self, step: int) -> Saved | None:
        """Save a published step that isn't committed yet; None if that failed.

        A lease that fails meanwhile doesn't undo the step, whose version already serves: the
        step is committed, and the next one begins with a recovery.
        """
        for attempt in range(1, SAVE_ATTEMPTS + 1):
            try:
                return await self.save(step)
            except ActivityError as error:
                text = f"checkpoint of step {step}, attempt {attempt}: {message_of(error)}"
                self._run.note(text)
            except LeaseFailedError as error:
                await self._trainer.abandon(error)
                return None
        return None

    def take_seconds(self) -> dict[int, float]:
        """Durations of saves that their steps' records don't have yet; the caller writes them."""
        seconds, self._state.seconds = self._state.seconds, {}
        return seconds

    def _next_attempt(self, step: int) -> int:
        """1, 2, ... under each lease."""
        lease_epoch, attempts = self._run.lease.lease_epoch, self._state.attempts
        if attempts is None or (attempts.step, attempts.lease_epoch) != (step, lease_epoch):
            attempts = SaveAttempts(step=step, lease_epoch=lease_epoch)
        attempts.count += 1
        self._state.attempts = attempts
        return attempts.count
