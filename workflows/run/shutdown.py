"""The end of a run: everything after its last step, and the cleanup after a failure.

Owns the order: rollouts end, committed state is saved and evaluated, the policy is promoted while
its session lives, and what the run has is given back. Doesn't own when a run ends, nor what it then
says (train_run.py).
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
    from workflows.run.evaluations import Evaluations
    from workflows.run.live_config import Settings
    from workflows.run.producer import Producer
    from workflows.run.recorder import Recorder
    from workflows.run.recovery import Recovery, backoff, remember
    from workflows.run.session import LeaseLostError, TrainerSession
    from workflows.run.state import CheckpointAt, RunState
    from workflows.run.step import SAVE_ATTEMPTS, save_checkpoint

PROMOTE_ATTEMPTS = 3
REAP_TIMEOUT = timedelta(minutes=3)
"""For the sandboxes that dead workers left behind; without a rollout worker nobody can reap."""
GROUPS_END_TIMEOUT = 30.0
"""Seconds to wait for cancelled groups to report; their workflows end by themselves anyway."""


@dataclass
class RunEnding:
    state: RunState
    settings: Settings
    trainer: TrainerSession
    producer: Producer
    evaluations: Evaluations
    recorder: Recorder
    recovery: Recovery

    async def finish(self, begun: bool) -> None:
        """Save, evaluate, promote, and give back; begun: whether there was a first lease."""
        state = self.state
        state.enter("finishing", "rollouts in flight")
        await self._end_groups()
        if begun:
            await self._final_checkpoint()
            await self._final_evaluation()
        await self.evaluations.cancel()
        await self._reap()
        self.producer.record_sample(force=True)
        await self.recorder.flush_producer_samples()
        await self.recorder.finish(state.admission.initial_version, state.admission.version)
        if begun:
            await self._promote()
        ending: Ending = "stopped" if state.stop else "completed"
        await self.recorder.control(ending, ending=ending)
        state.enter("finishing", "the trainer session's end")
        await self.trainer.release()
        await self._give_back_provisions()
        await workflow.wait_condition(workflow.all_handlers_finished)

    async def clean_up(self, ending: Ending, why: str) -> None:
        """Leave nothing that spends, after a failure or a cancellation."""
        self.recorder.give_up()
        await self._end_groups()
        await self.evaluations.cancel()
        await self.trainer.release()
        await self._reap()
        await self._give_back_provisions()
        await self.recorder.flush_producer_samples()
        await self.recorder.control(why, ending=ending)
        await workflow.wait_condition(workflow.all_handlers_finished)

    async def _final_checkpoint(self) -> None:
        state = self.state
        attempts = 0
        while self.settings.config.save_final_checkpoint and not state.saved:
            state.enter("finishing", "the final checkpoint")
            attempts += 1
            try:
                saved = await save_checkpoint(self.trainer, state, state.step)
            except ActivityError as error:
                cause = message_of(error)
                state.note(f"final checkpoint, attempt {attempts}: {cause}")
                if attempts >= SAVE_ATTEMPTS:
                    raise ApplicationError(
                        f"the state of step {state.step} can't be saved: {cause}. The ledger has "
                        "the step: `everburn resume` replays it from the checkpoint before",
                        type="CheckpointFailed",
                        non_retryable=True,
                    ) from error
            except LeaseLostError as loss:
                attempts = 0
                if not await self.recovery.recover(loss):
                    return
            else:
                remember(state, CheckpointAt(step=state.step, path=saved.path))
                state.save_seconds[state.step] = saved.seconds
                await self.recorder.control("final checkpoint", checkpoint=saved.path)

    async def _promote(self) -> None:
        """Make a model of the final policy, as long as its session lives."""
        state, model_id = self.state, self.settings.config.output_model_id
        attempt = 0
        again = False
        while model_id is not None and state.model is None:
            attempt += 1
            state.enter("promoting the final policy", f"model {model_id}")
            order = Promote(
                lease=self.trainer.ref,
                version=state.admission.version,
                snapshot=state.snapshot,
                model_id=model_id,
                attempt=attempt,
                again=again,
            )
            try:
                promoted: Promoted = await self.trainer.run(
                    LeaseContract.promote, order, f"promote {state.snapshot} to {model_id}"
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
            except LeaseLostError as loss:
                again = True
                if not await self.recovery.recover(loss):
                    return

    async def _final_evaluation(self) -> None:
        state = self.state
        state.enter("finishing", "the evaluation of the current version")
        while state.evaluating is not None or self.evaluations.wanted(state.admission.version):
            await self.evaluations.start(state.admission.version)
            await self.evaluations.finish(lambda: self.trainer.lost)
            try:
                self.trainer.check()
            except LeaseLostError as loss:
                if not await self.recovery.recover(loss):
                    break
        # Also where it had failed already, while the final checkpoint was saved.
        await self.producer.settle_fatal()

    async def _end_groups(self) -> None:
        state = self.state
        await workflow.wait_condition(lambda: self.producer.settled)
        self.producer.cancel_all()
        with contextlib.suppress(asyncio.TimeoutError):
            await workflow.wait_condition(lambda: not state.out, timeout=GROUPS_END_TIMEOUT)

    async def _give_back_provisions(self) -> None:
        """The trainer job and the deployment, where the run may have made them."""
        made = self.recorder.owns_folder and self.state.epoch > 0
        if not self.settings.config.dedicated or not made:
            return
        self.state.waiting_for = "the cleanup of trainer job and deployment"
        problem = await clean_up(self.state.run)
        if problem is not None:
            self.state.note(problem)

    async def _reap(self) -> None:
        """End what completions whose workers died have left behind."""
        state = self.state
        if not self.recorder.owns_folder:
            return  # what is registered in it may be in use
        try:
            left = await self.recorder.count_sandboxes()
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
