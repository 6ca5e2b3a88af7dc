"""One optimizer step: submissions, one update, one publication, one ledger entry.

Owns the order in which these happen, and what a fatal error or a stop does to a step. A coroutine
of TrainRun, not a child: it works on the run's state. Step k+1 submits nothing before step k is
committed, since their gradients would mix; groups that are accepted meanwhile queue.
"""

import math
from typing import Literal

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from activities.contracts import LeaseContract
    from activities.failure_types import FailureKind, message_of
    from activities.messages import OptimStep, OptimStepped, Publish, Published, Submitted
    from everburn.learning.schedules import learning_rate
    from everburn.records.ids import in_order
    from everburn.records.ledger import AdamParams, StepCommit
    from everburn.records.metrics import Number
    from workflows.run.batch import OpenBatch
    from workflows.run.parts import RunParts
    from workflows.run.session import LeaseFailedError
    from workflows.run.state import Sent
    from workflows.run.step_metrics import gradient_metrics, recovery_metrics

Taken = Literal["taken", "none", "open"]
"""none: there was no step, because the rows are done, or the run stops. open: another execution
takes the step."""


class OptimizerStep:
    """The step after the last committed one."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._state = parts.state
        self._trainer = parts.trainer
        self._number = parts.state.step.committed + 1
        self._batch = OpenBatch(parts, self._number)
        self._metrics: dict[str, Number] = {}

    async def run(self) -> Taken:
        """Take the step.

        Raises:
            LeaseFailedError: the trainer's state is lost or in doubt.
            ActivityError, ApplicationError: the step can't be taken; nothing was published.
        """
        self._count_attempt()
        collected = await self._batch.collect()
        if collected != "sent":
            return collected
        submitted = await self._batch.gradients()
        updated = any(result.datums for result in submitted)
        adam = self._adam()
        if updated:
            await self._optimize(adam)
        elif self._parts.config.require_update:
            raise self._nothing_to_learn()
        await self._finish_evaluation()
        published = await self._publish(updated)
        self._measure(submitted, published, adam)
        self._go_live(published)
        checkpoint = await self._checkpoint()
        await self._commit(adam, updated, checkpoint)
        return "taken"

    def _enter(self, phase: str, waiting_for: str) -> None:
        self._state.enter(f"step {self._number}: {phase}", waiting_for)

    def _count_attempt(self) -> None:
        """A lease counts once, unless it failed before the step began."""
        step, lease_epoch = self._state.step, self._state.lease.lease_epoch
        if step.attempted_under != lease_epoch and not self._trainer.ended:
            step.attempts += 1
            step.attempted_under = lease_epoch

    # The update

    def _adam(self) -> AdamParams:
        config, rows = self._parts.config, self._state.producer.cursor.total
        total_steps = max(self._number, math.ceil(rows / config.prompt_groups_per_step))
        rate = learning_rate(
            self._number,
            total_steps,
            config.learning_rate,
            config.lr_scheduler,
            config.warmup_steps,
        )
        return AdamParams(
            learning_rate=rate,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.grad_clip_norm,
            normalization=config.grad_accumulation_normalization,
        )

    async def _optimize(self, adam: AdamParams) -> None:
        self._enter("training", "the optimizer step")
        try:
            with self._batch.trainer_time.measured():
                result: OptimStepped = await self._trainer.run(
                    LeaseContract.optim_step,
                    OptimStep(lease=self._trainer.ref, step=self._number, adam=adam),
                    f"step {self._number} · optimizer · learning rate {adam.learning_rate:.3g}",
                )
        except ActivityError as error:
            # Every backward pass succeeded: a trainer that refuses has lost its gradients.
            raise LeaseFailedError(message_of(error), FailureKind.TRAINER_FAILED) from error
        if "grad_norm" in result.metrics:
            self._metrics["train/grad_norm"] = result.metrics["grad_norm"]

    def _nothing_to_learn(self) -> ApplicationError:
        return ApplicationError(
            f"step {self._number}: all completions of each row got the same reward, so there is "
            "nothing to learn from, and require_update is set. Calibrate the difficulty of the "
            "task, or raise temperature or completions_per_prompt",
            type="NoTrainingSignal",
            non_retryable=True,
        )

    # The publication

    async def _finish_evaluation(self) -> None:
        """The evaluation of the current snapshot ends before the snapshot is replaced."""
        self._enter("publishing", "the evaluation of the current version")
        await self._parts.evaluations.finish(lambda: self._trainer.ended)
        self._trainer.check()

    async def _publish(self, updated: bool) -> Published:
        self._enter("publishing", "sampler weights")
        version = self._state.version + 1
        if not updated:
            await self._parts.recorder.carry_publication(version)
            return Published(snapshot=self._state.step.snapshot, seconds=0.0)
        published: Published = await self._trainer.run(
            LeaseContract.publish,
            Publish(lease=self._trainer.ref, version=version),
            f"step {self._number} · publish policy v{version}",
        )
        return published

    def _go_live(self, published: Published) -> None:
        """The new version serves: capacity opens, and the gauges' next window begins."""
        self._metrics |= self._parts.producer.close_window()
        self._state.step.publish(published.snapshot, workflow.time())
        self._state.step.seconds = self._metrics["perf/step_time"]
        self._parts.producer.publish()

    # The record

    def _measure(self, submitted: list[Submitted], published: Published, adam: AdamParams) -> None:
        batch = self._batch
        self._metrics |= {
            "train/lr": adam.learning_rate,
            "perf/step_time": workflow.time() - self._state.step.published_at,
            "perf/weight_update_time": published.seconds,
            **batch.trainer_time.metrics(),
            **gradient_metrics(submitted),
            **recovery_metrics(self._state.recovered),
        }
        if batch.prepare_seconds is not None:
            self._metrics["perf/prepare_batch_time"] = batch.prepare_seconds
        if published.gap is not None:
            self._metrics["train/publication_gap"] = published.gap

    async def _checkpoint(self) -> str | None:
        """The periodic checkpoint, if one is due."""
        interval = self._parts.config.dcp_save_interval
        if not interval or self._number % interval:
            return None
        self._enter("saving", "a checkpoint")
        saved = await self._parts.checkpoints.save_periodic(self._number)
        if saved is not None:
            self._metrics["checkpoint/wall_time"] = saved.seconds
            return saved.path
        if not self._trainer.ended:
            self._metrics["checkpoint/failed"] = 1
        return None

    async def _commit(self, adam: AdamParams, updated: bool, checkpoint: str | None) -> None:
        state, parts, step = self._state, self._parts, self._state.step
        self._enter("committing", "the ledger")
        committed = await parts.recorder.commit(
            StepCommit(
                run=state.run,
                incarnation=state.incarnation,
                step=self._number,
                version=state.version,
                lease_epoch=state.lease.lease_epoch,
                attempts=step.attempts,
                updated=updated,
                groups=in_order(group.key for group in state.producer.queue.batch),
                submission_count=self._batch.submission_count,
                prepared=self._batch.prepared,
                adam=adam,
                snapshot=step.snapshot,
                checkpoint=checkpoint,
                seconds=self._metrics["perf/step_time"],
                metrics=self._metrics,
                command_range=parts.recorder.uncommitted_commands,
                rejected=parts.producer.take_rejected(),
                save_seconds=parts.checkpoints.take_seconds(),
                producer=parts.recorder.take_producer_records(),
            )
        )
        parts.producer.commit_batch()
        step.committed = self._number
        step.sent = Sent()
        step.attempts = step.attempted_under = 0
        if committed.reward is not None:
            step.reward = committed.reward
        if checkpoint is not None:
            state.checkpoints.remember(self._number, checkpoint)
        state.progressed(workflow.time())
        await parts.recorder.flush_producer_records()
