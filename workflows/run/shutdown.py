"""The end of a run: everything after its last step, and the cleanup after a failure.

Owns the order: rollouts end, committed state is saved and evaluated, the policy is promoted while
its session lives, and what the run holds is released. Doesn't own when a run ends, nor its result
(train_run.py).
"""

import asyncio
import contextlib
from dataclasses import dataclass
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.contracts import LeaseContract, RolloutContract
    from activities.failure_types import FailureKind, kind_of, message_of
    from activities.messages import Promote, Promoted, ReapResult
    from everburn.records.commands import Ending
    from workflows.children.provisioning import clean_up
    from workflows.queues import ROLLOUT_QUEUE
    from workflows.run.checkpoints import SAVE_ATTEMPTS
    from workflows.run.parts import RunParts
    from workflows.run.recovery import Recovery, backoff
    from workflows.run.session import LeaseFailedError

PROMOTE_ATTEMPTS = 3
REAP_TIMEOUT = timedelta(minutes=3)
"""For sandboxes of dead workers; without a rollout worker they can't be reaped."""
GROUPS_END_TIMEOUT = 30.0
"""Seconds to wait for the reports of cancelled groups, which end by themselves anyway."""


@dataclass
class RunEnding:
    parts: RunParts
    recovery: Recovery

    async def finish(self, begun: bool) -> None:
        """Save, evaluate, promote and release. begun: whether there was a first lease."""
        parts, state = self.parts, self.parts.state
        state.enter("finishing", "rollouts in flight")
        await self._end_groups()
        if begun:
            await self._final_checkpoint()
            await self._final_evaluation()
        await parts.evaluations.cancel()
        await self._reap()
        parts.producer.record_sample(force=True)
        await parts.recorder.flush_producer_records()
        await parts.recorder.finish(parts.checkpoints.take_seconds())
        if begun:
            await self._promote()
        ending: Ending = "stopped" if state.commands.stop else "completed"
        await parts.recorder.command(ending, ending=ending)
        state.enter("finishing", "the trainer session's end")
        await parts.trainer.release()
        await self._release_provisions()
        await workflow.wait_condition(workflow.all_handlers_finished)

    async def clean_up(self, ending: Ending, why: str) -> None:
        """Release everything that costs, after a failure or a cancellation."""
        recorder = self.parts.recorder
        recorder.give_up()
        await self._end_groups()
        await self.parts.evaluations.cancel()
        await self.parts.trainer.release()
        await self._reap()
        await self._release_provisions()
        await recorder.flush_producer_records()
        await recorder.command(why, ending=ending)
        await workflow.wait_condition(workflow.all_handlers_finished)

    async def _final_checkpoint(self) -> None:
        parts, state = self.parts, self.parts.state
        step = state.step.committed
        attempts = 0
        while parts.config.save_final_checkpoint and not state.checkpoints.has(step):
            state.enter("finishing", "the final checkpoint")
            attempts += 1
            try:
                path = await parts.checkpoints.save_committed()
            except ActivityError as error:
                cause = message_of(error)
                state.note(f"final checkpoint, attempt {attempts}: {cause}")
                if attempts >= SAVE_ATTEMPTS:
                    raise ApplicationError(
                        f"the state of step {step} can't be saved: {cause}. The ledger has the "
                        "step: `everburn resume` replays it from the checkpoint before",
                        type="CheckpointFailed",
                        non_retryable=True,
                    ) from error
            except LeaseFailedError as error:
                attempts = 0
                if not await self.recovery.recover(error):
                    return
            else:
                await parts.recorder.command("final checkpoint", checkpoint=path)

    async def _promote(self) -> None:
        """Make a model of the final policy, while its session lives."""
        state, trainer = self.parts.state, self.parts.trainer
        model_id = self.parts.config.output_model_id
        attempt = 0
        again = False
        while model_id is not None and state.model is None:
            attempt += 1
            state.enter("promoting the final policy", f"model {model_id}")
            order = Promote(
                lease=trainer.ref,
                version=state.version,
                snapshot=state.step.snapshot,
                model_id=model_id,
                attempt=attempt,
                again=again,
            )
            try:
                promoted: Promoted = await trainer.run(
                    LeaseContract.promote, order, f"promote {order.snapshot} to {model_id}"
                )
                state.model = promoted.model
            except ActivityError as error:
                cause = message_of(error)
                kind = kind_of(error.cause)
                state.note(f"promotion, attempt {attempt}: {cause}")
                if attempt == PROMOTE_ATTEMPTS or kind == FailureKind.MODEL_ID_TAKEN:
                    raise ApplicationError(
                        f"{cause}. The run is trained and saved: `everburn resume {state.run.id}` "
                        "tries the promotion again, and takes --set output_model_id=ID for another "
                        "id",
                        type="PromotionFailed",
                        non_retryable=True,
                    ) from error
                again = again or kind != FailureKind.PROMOTION_REFUSED
                await workflow.sleep(backoff(attempt))
            except LeaseFailedError as error:
                again = True
                if not await self.recovery.recover(error):
                    return

    async def _final_evaluation(self) -> None:
        parts, state = self.parts, self.parts.state
        state.enter("finishing", "the evaluation of the current version")
        while state.evaluation.running is not None or parts.evaluations.wanted(state.version):
            await parts.evaluations.start(state.version)
            await parts.evaluations.finish(lambda: parts.trainer.ended)
            try:
                parts.trainer.check()
            except LeaseFailedError as error:
                if not await self.recovery.recover(error):
                    break
        # The evaluation may have failed earlier, while the final checkpoint was saved.
        await parts.producer.settle_fatal()

    async def _end_groups(self) -> None:
        parts = self.parts
        await workflow.wait_condition(lambda: parts.producer.settled)
        parts.producer.cancel_all()
        with contextlib.suppress(asyncio.TimeoutError):
            await workflow.wait_condition(
                lambda: not parts.state.producer.out, timeout=GROUPS_END_TIMEOUT
            )

    async def _release_provisions(self) -> None:
        """Release the trainer job and the deployment, if the run may have created them."""
        state = self.parts.state
        created = self.parts.recorder.owns_folder and state.lease.lease_epoch > 0
        if not self.parts.config.dedicated or not created:
            return
        state.wait_for("the cleanup of trainer job and deployment")
        problem = await clean_up(state.run)
        if problem is not None:
            state.note(problem)

    async def _reap(self) -> None:
        """End what completions of dead workers have left behind."""
        state, recorder = self.parts.state, self.parts.recorder
        if not recorder.owns_folder:
            return  # what is registered there may be in use by another run
        try:
            left = await recorder.count_sandboxes()
            if left:
                result: ReapResult = await workflow.execute_activity_method(
                    RolloutContract.reap,
                    state.run,
                    task_queue=ROLLOUT_QUEUE,
                    schedule_to_close_timeout=REAP_TIMEOUT,
                    heartbeat_timeout=timedelta(seconds=10),
                    summary=f"reap {left} sandboxes",
                )
                left = result.left
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            why = message_of(error)
            state.note(f"sandboxes of rollouts may be left: {why}; see `everburn reap`")
        else:
            if left:
                state.note(f"{left} sandboxes of rollouts are left: see `everburn reap`")
