"""One optimizer step: submissions, one update, one publication, one ledger entry.

Owns the order in which these happen and what a fatal error or a stop does to a step. A coroutine
of TrainRun, not a child: it works on the run's state. Step k+1 submits nothing before step k is
committed, since their gradients would mix; groups that are accepted meanwhile queue.
"""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Literal

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from activities.contracts import LeaseContract
    from activities.failure_types import FailureKind, message_of
    from activities.messages import (
        CommitStep,
        OptimStep,
        OptimStepped,
        PrepareBatch,
        Publish,
        Published,
        SaveCheckpoint,
        Saved,
        SubmitGroups,
        Submitted,
    )
    from everburn.learning.diagnostics import distance_metrics
    from everburn.learning.schedules import learning_rate
    from everburn.records.ids import RewardSum, decode_groups, encode_groups, group_ranges
    from everburn.records.ledger import AdamParams, PreparedBatch
    from workflows.run.evaluations import Evaluations
    from workflows.run.live_config import Settings
    from workflows.run.producer import Producer
    from workflows.run.recorder import Recorder
    from workflows.run.recovery import remember
    from workflows.run.session import LeaseLostError, TrainerSession, look_at_outcome
    from workflows.run.state import CheckpointAt, LeaseFailures, RunState, Sent

LONG_STEP = 6_000
"""Events after which a step goes on in another execution while its batch is collected: rows that a
filter rejects fill a history that no step ends. Then what was sent is asked for once more, so the
run prefers the time between steps (train_run.py), which comes at half as many."""
MAX_SHOWN = 200
"""Characters of its groups in an activity's summary."""
SAVE_ATTEMPTS = 2
"""A service that can't save twice in a row won't the third time; the next interval tries again."""


Outcome = Literal["taken", "none", "open"]
"""none: there was no step to take, with the rows done, or the run stopped in time. open: its batch
is collected on, by another OptimizerStep, as long as state and trainer are what they are."""


@dataclass
class OptimizerStep:
    """The step after the last committed one."""

    state: RunState
    settings: Settings
    trainer: TrainerSession
    producer: Producer
    evaluations: Evaluations
    recorder: Recorder
    _parts: list[str] = field(default_factory=list)
    """The groups of each submission of this execution."""
    _pending: list["asyncio.Task[Submitted]"] = field(default_factory=list)
    _prepared: PreparedBatch | None = None
    """Where the run has a `prepare_batch`, once the batch is sealed."""
    _prepare_seconds: float | None = None
    _busy: list[tuple[float, float]] = field(default_factory=list)
    """Spans of workflow time in which the trainer had a request of this step."""

    @property
    def number(self) -> int:
        return self.state.step + 1

    async def run(self) -> Outcome:
        """Take the step.

        Raises:
            LeaseLostError: the trainer's state is lost or in doubt.
            ActivityError, ApplicationError: the step can't be done; nothing was published.
        """
        self._count_attempt()
        collected = await self._submit_batch()
        if collected != "sent":
            return collected
        submitted = await self._gradients()
        adam = self._adam()
        updated = any(result.datums for result in submitted)
        optimized = None
        if updated:
            optimized = await self._optimize(adam)
        elif self.settings.config.require_update:
            raise self._nothing_to_learn()
        await self._finish_evaluation()
        published = await self._publish(updated)
        metrics = self._metrics(submitted, optimized, published, adam)
        self._go_live(published, metrics)
        checkpoint = await self._checkpoint(metrics)
        await self._commit(metrics, adam, updated, checkpoint)
        return "taken"

    def _count_attempt(self) -> None:
        """A lease that is lost already begins nothing."""
        state = self.state
        if state.attempted_under != state.epoch and not self.trainer.lost:
            state.attempts += 1
            state.attempted_under = state.epoch

    # The batch

    async def _submit_batch(self) -> Literal["sent", "none", "open"]:
        """Send every group of the batch as soon as it is ready, until all are sent."""
        state = self.state
        while True:
            missing = state.queue.batch_size - len(state.queue.batch)
            self._phase("collecting", f"{missing} more prompt groups")
            await workflow.wait_condition(self._can_go_on)
            self.trainer.check()
            if (refusal := self._refusal()) is not None:
                raise refusal
            if state.checkpoint_wanted:
                # Weights are still those of the last committed step: gradients don't change them.
                await self._save_committed()
                continue
            if not state.batch_sealed:
                # A fatal error after sealing belongs to a later batch: this one is finished, so
                # that trainer and sampler don't diverge.
                await self.producer.settle_fatal()
                if state.rows_done or state.stopping:
                    return "none"
                if self._is_long():
                    if self._sending():
                        await workflow.wait_condition(lambda: not self._sending())
                        continue
                    self._carry()
                    return "open"
            if self._ready():
                if self.settings.config.prepare_batch is not None and self._prepared is None:
                    await self._prepare_batch()
                self._submit()
            elif state.batch_sealed:
                return "sent"

    def _can_go_on(self) -> bool:
        state = self.state
        interrupted = state.fatal is not None or self.trainer.lost or state.stopping
        interrupted = interrupted or state.checkpoint_wanted or self._refusal() is not None
        done = state.rows_done or state.batch_sealed
        return interrupted or done or self._ready() or self._is_long()

    def _is_long(self) -> bool:
        """Whether the batch had better be collected in another execution from now on."""
        return workflow.info().get_current_history_length() > LONG_STEP

    def _sending(self) -> bool:
        return not self.trainer.lost and any(not each.done() for each in self._pending)

    def _carry(self) -> None:
        """Leave to the next execution what this one has sent."""
        sent = self.state.sent
        self.state.sent = Sent(
            parts=[*sent.parts, *self._parts],
            since=min((start for start, _ in self._busy), default=None)
            if sent.since is None
            else sent.since,
            busy=sent.busy + union_seconds(self._busy),
        )

    def _ready(self) -> bool:
        if self.settings.config.submits_whole_batches and not self.state.batch_sealed:
            return False
        return self.state.queue.ready > 0

    async def _prepare_batch(self) -> None:
        """Advantages of the sealed batch, by the user's function, before anything is sent."""
        self._phase("training", "prepare_batch")
        started = workflow.time()
        groups = encode_groups([group.key for group in self.state.queue.batch])
        self._prepared = await self.trainer.run(
            LeaseContract.prepare_batch,
            PrepareBatch(lease=self.trainer.ref, step=self.number, groups=groups),
            f"step {self.number} · prepare the batch · {_rows(groups)}",
        )
        self._prepare_seconds = workflow.time() - started

    def _submit(self) -> None:
        """One request with all groups that are ready; several may be pending."""
        taken = self.state.queue.take_submission()
        if self._prepared is None:
            groups = [group.key for group in taken if group.d]
        else:
            trained = decode_groups(self._prepared.groups)
            groups = [group.key for group in taken if group.key in trained]
        if not groups:
            return
        part, encoded = self._submissions, encode_groups(groups)
        submission = asyncio.create_task(self._forward_backward(part, encoded))
        # A step that a lost lease has ended doesn't wait for what it had pending.
        submission.add_done_callback(look_at_outcome)
        self._parts.append(encoded)
        self._pending.append(submission)

    @property
    def _submissions(self) -> int:
        return len(self.state.sent.parts) + len(self._parts)

    async def _forward_backward(self, part: int, groups: str) -> Submitted:
        started = workflow.time()
        result = await self._ask(part, groups)
        self._busy.append((started, workflow.time()))
        return result

    async def _ask(self, part: int, groups: str) -> Submitted:
        order = SubmitGroups(
            lease=self.trainer.ref,
            step=self.number,
            part=part,
            groups=groups,
            prepared=self._prepared,
        )
        result: Submitted = await self.trainer.run(
            LeaseContract.forward_backward,
            order,
            f"step {order.step} · submission {part} · {_rows(groups)}",
        )
        return result

    def _refusal(self) -> BaseException | None:
        """Why a submission failed, if one has: nothing that follows can mend it."""
        ended = (task for task in self._pending if task.done() and not task.cancelled())
        return next((error for task in ended if (error := task.exception())), None)

    async def _gradients(self) -> list[Submitted]:
        self._phase("training", "gradients")
        # Whoever holds the lease has the results of what was sent before, and sends nothing again.
        earlier = [
            asyncio.create_task(self._ask(part, groups))
            for part, groups in enumerate(self.state.sent.parts)
        ]
        self._pending = [*earlier, *self._pending]
        try:
            return await asyncio.gather(*self._pending)
        except (Exception, asyncio.CancelledError):
            for task in self._pending:
                task.cancel()
            raise

    # The update

    def _nothing_to_learn(self) -> ApplicationError:
        return ApplicationError(
            f"step {self.number}: all completions of each row got the same reward, so there is "
            "nothing to learn from, and require_update is set. Calibrate the difficulty of the "
            "task, or raise temperature or completions_per_prompt",
            type="NoTrainingSignal",
            non_retryable=True,
        )

    async def _optimize(self, adam: AdamParams) -> OptimStepped:
        self._phase("training", "the optimizer step")
        started = workflow.time()
        try:
            result: OptimStepped = await self.trainer.run(
                LeaseContract.optim_step,
                OptimStep(lease=self.trainer.ref, step=self.number, adam=adam),
                f"step {self.number} · optimizer · learning rate {adam.learning_rate:.3g}",
            )
        except ActivityError as error:
            # Every backward succeeded, so a trainer that refuses has lost its gradients.
            raise LeaseLostError(message_of(error), FailureKind.TRAINER_FAILED) from error
        self._busy.append((started, workflow.time()))
        return result

    def _adam(self) -> AdamParams:
        config, rows = self.settings.config, self.state.cursor.total
        total_steps = max(self.number, math.ceil(rows / config.prompt_groups_per_step))
        rate = learning_rate(
            self.number,
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

    # The publication

    async def _finish_evaluation(self) -> None:
        """The current snapshot is about to be replaced: whoever evaluates it comes first."""
        self._phase("publishing", "the evaluation of the current version")
        await self.evaluations.finish(lambda: self.trainer.lost)
        self.trainer.check()

    async def _publish(self, updated: bool) -> Published:
        self._phase("publishing", "sampler weights")
        version = self.state.admission.version + 1
        if not updated:
            await self.recorder.carry_publication(version)
            return Published(snapshot=self.state.snapshot, seconds=0.0)
        published: Published = await self.trainer.run(
            LeaseContract.publish,
            Publish(lease=self.trainer.ref, version=version),
            f"step {self.number} · publish policy v{version}",
        )
        return published

    def _go_live(self, published: Published, metrics: dict[str, float | int]) -> None:
        """The new version serves: capacity opens, and the gauges' next window begins."""
        state = self.state
        metrics |= self.producer.close_window()
        state.published_at = workflow.time()
        state.step_seconds = metrics["perf/step_time"]
        state.snapshot = published.snapshot
        state.admission.publish()
        self.producer.refill()

    # The record

    async def _save_committed(self) -> None:
        """A person asked for a checkpoint: of the last committed step, unless it has one."""
        state = self.state
        self._phase("saving", "a checkpoint that was asked for")
        refusal = None
        try:
            if state.checkpoints[-1].step != state.step:
                saved = await save_checkpoint(self.trainer, state, state.step)
                remember(state, CheckpointAt(step=state.step, path=saved.path))
                state.save_seconds[state.step] = saved.seconds
        except ActivityError as error:
            refusal = message_of(error)
        except LeaseLostError:
            state.refuse_checkpoint("the trainer was lost meanwhile; ask again")
            raise
        # A run that is cancelled over it answers by itself.
        state.checkpoint_error, state.checkpoint_wanted = refusal, False

    async def _checkpoint(self, metrics: dict[str, float | int]) -> str | None:
        """The periodic checkpoint, where one is due.

        A lease that is lost over it doesn't undo the step: its version serves already. The step
        is committed, and the next one begins with a recovery.
        """
        interval = self.settings.config.dcp_save_interval
        if not interval or self.number % interval:
            return None
        self._phase("saving", "a checkpoint")
        for attempt in range(1, SAVE_ATTEMPTS + 1):
            try:
                saved = await save_checkpoint(self.trainer, self.state, self.number)
            except ActivityError as error:
                cause = message_of(error)
                self.state.note(f"checkpoint of step {self.number}, attempt {attempt}: {cause}")
                continue
            except LeaseLostError as loss:
                await self.trainer.abandon(loss)
                return None
            metrics["checkpoint/wall_time"] = saved.seconds
            return saved.path
        metrics["checkpoint/failed"] = 1
        return None

    async def _commit(
        self,
        metrics: dict[str, float | int],
        adam: AdamParams,
        updated: bool,
        checkpoint: str | None,
    ) -> None:
        state, told = self.state, (self.state.told_committed, self.state.told)
        # What comes while it is being committed belongs to the next step.
        rejected, state.rejected = state.rejected, RewardSum()
        self._phase("committing", "the ledger")
        committed = await self.recorder.commit(
            CommitStep(
                run=state.run,
                step=self.number,
                version=state.admission.version,
                epoch=state.epoch,
                updated=updated,
                groups=encode_groups([group.key for group in state.queue.batch]),
                submissions=self._submissions,
                prepared=self._prepared,
                adam=adam,
                snapshot=state.snapshot,
                checkpoint=checkpoint,
                life=state.life,
                told=told,
                seconds=metrics["perf/step_time"],
                metrics=metrics,
                rejected=rejected,
                attempts=state.attempts,
                save_seconds=state.save_seconds,
                producer=self.recorder.take_producer_samples(),
            )
        )
        for group in state.queue.commit():
            state.cursor.resolve(group.c)
            state.again.pop(group.c, None)
        state.told_committed = told[1]
        state.save_seconds.clear()
        state.sent = Sent()
        state.step += 1
        state.lease_failures = LeaseFailures()
        state.attempts = state.attempted_under = 0
        state.progressed(workflow.time())
        if checkpoint is not None:
            remember(state, CheckpointAt(step=state.step, path=checkpoint))
        state.reward = committed.reward if committed.reward is not None else state.reward
        # A long step leaves more samples than fit beside its record.
        await self.recorder.flush_producer_samples()

    def _metrics(
        self,
        submitted: list[Submitted],
        optimized: OptimStepped | None,
        published: Published,
        adam: AdamParams,
    ) -> dict[str, float | int]:
        """`train/*` and `perf/*` of docs/metrics.md."""
        now = workflow.time()
        values: dict[str, float | int] = {
            "train/lr": adam.learning_rate,
            "perf/step_time": now - self.state.published_at,
            "perf/weight_update_time": published.seconds,
        }
        if self._prepare_seconds is not None:
            values["perf/prepare_batch_time"] = self._prepare_seconds
        if self._busy:
            sent = self.state.sent
            start, end = min(s for s, _ in self._busy), max(e for _, e in self._busy)
            start = start if sent.since is None else sent.since
            train_time = sent.busy + union_seconds(self._busy)
            values["perf/train_time"] = train_time
            values["perf/train_wait_time"] = end - start - train_time
            if end > start:
                values["perf/wait_time_ratio"] = 1 - train_time / (end - start)
        if published.gap is not None:
            values["train/publication_gap"] = published.gap
        tokens = sum(result.distance.tokens for result in submitted)
        if tokens:
            values["train/tokens"] = tokens
            values |= distance_metrics([result.distance for result in submitted])
            values |= loss_metrics(submitted)
        if (recovered := self.state.recovered) is not None:
            values |= {
                "recovery/leases": recovered.leases,
                "recovery/redone_steps": recovered.redone_steps,
                "recovery/rollouts_reused": recovered.reused_rollouts,
                "recovery/seconds": recovered.seconds,
            }
        if optimized is not None and "grad_norm" in optimized.metrics:
            values["train/grad_norm"] = optimized.metrics["grad_norm"]
        return values

    def _phase(self, phase: str, waiting_for: str) -> None:
        self.state.phase = f"step {self.number}: {phase}"
        self.state.waiting_for = waiting_for


async def save_checkpoint(trainer: TrainerSession, state: RunState, step: int) -> Saved:
    """Save the trainer's state as `state-<step>`; another attempt takes another name, since the
    one that failed may have left something under its own.

    Raises:
        LeaseLostError, ActivityError
    """
    attempt = state.next_save(step)
    name = f"state-{step}" if attempt == 1 else f"state-{step}-try-{attempt}"
    saved: Saved = await trainer.run(
        LeaseContract.save_checkpoint,
        SaveCheckpoint(lease=trainer.ref, step=step, version=state.admission.version, name=name),
        f"step {step} · checkpoint {name}",
    )
    state.note_saved(step, saved.path)
    return saved


def loss_metrics(submitted: list[Submitted]) -> dict[str, float]:
    """train/loss, per trained token, and a Python loss's own metrics as `loss/*`: means over the
    requests, weighted by their trained tokens; and train/total_tokens. Absent where a request
    doesn't tell."""
    tokens = sum(result.distance.tokens for result in submitted)
    sums = [result.loss_sum for result in submitted]
    values = {}
    if None not in sums:
        values["train/loss"] = math.fsum(each for each in sums if each is not None) / tokens
    totals = [result.total_tokens for result in submitted]
    if None not in totals:
        values["train/total_tokens"] = math.fsum(each for each in totals if each is not None)
    names = set[str].intersection(*(set(result.loss_metrics) for result in submitted))
    for name in sorted(names):
        weighted = (r.loss_metrics[name] * r.distance.tokens for r in submitted)
        values[f"loss/{name}"] = math.fsum(weighted) / tokens
    return values


def union_seconds(spans: list[tuple[float, float]]) -> float:
    """The time covered by at least one of the spans."""
    covered, until = 0.0, -math.inf
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _rows(groups: str) -> str:
    """Encoded groups as an activity's summary shows them."""
    ranges = group_ranges(decode_groups(groups))
    return f"rows {ranges}" if len(ranges) <= MAX_SHOWN else f"rows {ranges[:MAX_SHOWN]}…"
