"""Recovery: from a failed lease back to the state after the last committed step.

Owns the sequence: a new lease, the newest checkpoint that loads, the ledger's steps since, the
publications that rollouts need. No rollout is sampled again; the interrupted step runs again from
the groups in the queue. Doesn't own how a failed lease is detected (session.py).
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
    from workflows.run.parts import RunParts
    from workflows.run.session import LeaseFailedError
    from workflows.run.state import Fatal, LeaseFailures

SAME_ANSWERS = 3
"""Consecutive leases on which the service answered with the same error, after which the step is
suspect: a datum may be the cause."""
INTERRUPTED = 10
"""Consecutive leases that failed with an operation of one step in flight, after which the step is
suspect. Many, because workers and servers die in series."""
PAUSES = (0, 0, 1, 2, 5, 10, 20, 40, 60)
"""Seconds before the next lease, by the number of consecutive failures."""
NO_CHECKPOINT = "NoCheckpoint"
NO_OTHER_LEASE = frozenset(
    {
        *LEASE_CLOSED,
        FailureKind.REJECTED,
        FailureKind.UNFIT,
        FailureKind.NOT_PROVISIONED,
    }
)
"""Failures after which no other lease is available before a person has fixed the cause."""
STOP_PATIENCE = 120.0
"""Seconds that a stopped run waits for a session to save and evaluate with. Without one nothing is
lost: the ledger has its steps, and `everburn resume` replays them."""
BACKOFF = (1, 1, 2, 3, 5, 10, 30, 60, 120, 300)
"""Seconds between attempts to get a session."""

_End = Literal["restored", "suspect", "unwanted"]


class Recovery:
    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._run = parts.state
        self._state = parts.state.recovery
        self._trainer = parts.trainer
        self._producer = parts.producer
        self._impatient = False
        """Whether a stopped run has waited for a session for STOP_PATIENCE."""

    async def recover(self, failure: LeaseFailedError) -> bool:
        """Restore the trainer; if that can't be done, set the run's fatal error.

        Admission is closed until weights and version are live again. Returns false if the run was
        stopped instead: while no session was available, with nothing left that needs one, or while
        the run was held.

        Raises:
            ApplicationError: the trainer can't be restored, and the run doesn't hold.
        """
        started = workflow.time()
        self.count(failure)
        restored = await self.restore(failure)
        self._state.seconds += workflow.time() - started
        return restored and not await self._producer.settle_fatal()

    async def restore(self, failure: LeaseFailedError) -> bool:
        """Bring a trainer to the state after the last committed step; false if that was stopped."""
        self._producer.open = False
        patience = asyncio.create_task(self._lose_patience())
        try:
            end = await self._until_restored(failure)
        finally:
            patience.cancel()
        if end == "unwanted":
            return False
        batch = self._run.producer.queue.batch
        self._state.reused_rollouts += sum(group.survivors for group in batch)
        self._run.restart_step()
        if end == "restored":
            self._producer.start()
        return True

    async def _until_restored(self, failure: LeaseFailedError) -> _End:
        """Try new leases until one is restored, the step is suspect, or none is needed."""
        attempts = 0
        await self._trainer.abandon(failure)
        while not self._unwanted():
            if self.suspects_step(failure) or self.takes_for_fatal(failure):
                return "suspect"
            self._run.enter(f"recovering from a failed lease ({failure})")
            try:
                await self.pause()
                await self._restore()
                return "restored"
            except LeaseFailedError as error:
                # Its weights may be those of no step.
                await self._trainer.abandon(error)
                failure = error
                if self._trainer.granted:
                    self.count(failure, recovering=True)
                else:
                    # No session was available, which says nothing about the step.
                    self._run.wait_for(f"a trainer session: {error}")
                    await self._pause(backoff(attempts))
                    attempts += 1
        self._note_left_out()
        return "unwanted"

    def count(self, failure: LeaseFailedError, *, recovering: bool = False) -> None:
        """Count a failed lease, unless no operation was in flight and the run only collected,
        paused or evaluated."""
        answered = failure.kind in (FailureKind.TRAINER_FAILED, NO_CHECKPOINT)
        answer = str(failure) if answered else None
        in_flight = self._trainer.interrupted
        if recovering or in_flight or answer is not None:
            self._failures.count(answer, in_flight=in_flight)

    @property
    def _failures(self) -> LeaseFailures:
        """Those since the last committed step."""
        if self._state.failures.since != self._run.step.committed:
            self._forget_failures()
        return self._state.failures

    def _forget_failures(self) -> None:
        self._state.failures = LeaseFailures(since=self._run.step.committed)

    async def pause(self) -> None:
        """Wait before the next lease, longer after more consecutive failures."""
        failed = self._failures.in_a_row
        seconds = PAUSES[min(failed, len(PAUSES) - 1)]
        if seconds:
            self._run.wait_for(f"a pause of {seconds} s: {failed} leases in a row failed")
            await self._pause(seconds)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(self._unwanted, timeout=seconds)

    def _unwanted(self) -> bool:
        """Whether the run stops, and needs no session, or has waited for one long enough."""
        return self._is_stopped() and (self._impatient or not self._left_to_do())

    def _left_to_do(self) -> list[str]:
        """What a run that stops would do with a session."""
        run, config, evaluations = self._run, self._parts.config, self._parts.evaluations
        saves = config.save_final_checkpoint and not run.checkpoints.has(run.step.committed)
        evaluates = run.evaluation.running is not None or evaluations.wanted(run.version)
        left = {
            "the final checkpoint": saves,
            "the final evaluation": evaluates,
            "the promotion": config.output_model_id is not None and run.model is None,
        }
        return [what for what, is_left in left.items() if is_left]

    def _is_stopped(self) -> bool:
        return self._run.commands.stop and not self._run.commands.drain

    def _note_left_out(self) -> None:
        left = self._left_to_do()
        if left:
            self._run.note(
                f"no trainer session was available for {' and '.join(left)}; the ledger has all "
                f"steps, and `everburn resume {self._run.run.id}` continues from them"
            )

    async def _lose_patience(self) -> None:
        await workflow.wait_condition(self._is_stopped)
        await workflow.sleep(STOP_PATIENCE, summary="stopped, and no session to save in")
        self._impatient = True

    def suspects_step(self, failure: LeaseFailedError) -> bool:
        """Whether the step is suspected of ending its leases, which is the run's fatal error.
        Counting then starts at zero."""
        failures = self._failures
        if failures.answered < SAME_ANSWERS and failures.interrupted < INTERRUPTED:
            return False
        if failure.kind == NO_CHECKPOINT:
            # The leases ended before they reached the step.
            error, error_type = f"{failure}: see the run's notes", NO_CHECKPOINT
        else:
            how = (
                f"on {SAME_ANSWERS} leases in a row the service answered with the same failure"
                if failures.answered >= SAME_ANSWERS
                else f"{INTERRUPTED} leases in a row failed while its requests were in flight"
            )
            error, error_type = f"{self._suspect()}: {how}; the last: {failure}", "StepKillsTrainer"
        self._run.fail(Fatal(error=error, error_type=error_type, infrastructure=True))
        self._forget_failures()
        return True

    def _suspect(self) -> str:
        run = self._run
        if not run.checkpoints.eligible:
            return "saving the initial state"
        if not run.producer.queue.batch:
            return f"what follows step {run.step.committed}"
        rows = group_ranges(group.key for group in run.producer.queue.batch)
        return f"step {run.step.committed + 1} (rows {rows})"

    def takes_for_fatal(self, failure: LeaseFailedError) -> bool:
        """Whether no other lease is available before a person has fixed the cause, which is then
        the run's fatal error."""
        if failure.kind not in NO_OTHER_LEASE:
            return False
        self._run.fail(
            Fatal(
                error=str(failure),
                error_type=failure.kind,
                holds=failure.kind == FailureKind.QUOTA,
            )
        )
        self._trainer.retry_later()
        return True

    async def _restore(self) -> None:
        """A new lease: load the newest checkpoint, replay the steps since, publish."""
        run = self._run
        run.wait_for("a trainer session")
        await self._trainer.acquire(self._unwanted)
        checkpoint = await self._load()
        for step in range(checkpoint, run.step.committed + 1):
            if step > checkpoint:
                await self._replay(step)
            if step in self._versions_in_use():
                await self._publish(step, current=False)
        published = await self._publish(run.version, current=True)
        run.step.snapshot = published.snapshot

    async def _load(self) -> int:
        """Load the newest checkpoint that loads; returns its step."""
        run = self._run
        for checkpoint in reversed(run.checkpoints.eligible):
            run.wait_for(f"checkpoint {checkpoint.path}")
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
                run.progressed(workflow.time())
                return checkpoint.step
            except ActivityError as error:
                cause = message_of(error)
                run.note(f"{checkpoint.path} doesn't load, an older one is tried: {cause}")
        raise LeaseFailedError("no checkpoint of the run can be loaded", NO_CHECKPOINT)

    async def _replay(self, step: int) -> None:
        self._run.wait_for(f"the replay of step {step} of {self._run.step.committed}")
        await self._trainer.run(
            LeaseContract.replay_step,
            ReplayStep(lease=self._trainer.ref, step=step),
            f"replay step {step}",
            counts=False,
        )
        self._state.redone_steps += 1
        self._run.progressed(workflow.time())

    def _versions_in_use(self) -> set[int]:
        """Versions before the current one that rollouts in flight sample from."""
        out = self._run.producer.out.values()
        return {group.version for group in out if group.version != self._run.version}

    async def _publish(self, version: int, *, current: bool) -> Published:
        self._run.wait_for(f"sampler weights of policy v{version}")
        why = "" if current else ", for rollouts that use it"
        published: Published = await self._trainer.run(
            LeaseContract.publish,
            Publish(lease=self._trainer.ref, version=version, current=current),
            f"publish policy v{version} again{why}",
            counts=False,
        )
        self._run.progressed(workflow.time())
        return published


def backoff(attempts: int) -> int:
    """Seconds before the next attempt to get a session, after so many."""
    return BACKOFF[min(attempts, len(BACKOFF) - 1)]
