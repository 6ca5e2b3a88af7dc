"""The producer: keeps rows in flight, and handles the outcomes of their groups.

Drives admission, cursor, queue, breaker and gauges; starts and cancels PromptGroups. Every change
is followed by a refill, so that capacity is never idle. Doesn't own optimizer steps, which take
groups out of the queue.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from temporalio import workflow
from temporalio.common import (
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.workflow import ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from activities.search_attributes import POLICY_VERSION, ROW, RUN
    from everburn.records.ids import GroupKey, RewardSum, group_workflow_id
    from everburn.records.metrics import Number, Value
    from workflows.children.prompt_group import PromptGroup, completion_limit
    from workflows.children.retries import MAX_FAILURES, MAX_WORKER_FAILURES
    from workflows.messages import (
        ROLLOUT_FAILED,
        GroupOrder,
        GroupReport,
        Released,
        RolloutsFailed,
    )
    from workflows.run.live_config import LiveConfig
    from workflows.run.recorder import Recorder
    from workflows.run.state import Fatal, GroupOut, RowHistory, RunState

SAMPLE_INTERVAL = 10.0
"""Minimum seconds between records of the producer stream."""
MAX_GROUPS_OUT = 512
"""Pending children of one workflow; a larger window waits in admission."""
GROUP_LIFETIME_FACTOR = MAX_FAILURES + MAX_WORKER_FAILURES + 2
"""A group's execution timeout, in limits of a completion: room for all attempts that count."""


class Producer:
    def __init__(self, state: RunState, live: LiveConfig, recorder: Recorder) -> None:
        self._run = state
        self._state = state.producer
        self._live = live
        self._recorder = recorder
        self.open = False
        """Admission is closed until weights and version are live."""
        self._is_over = False
        self._starting: dict[asyncio.Task[None], None] = {}
        """Ordered: what a workflow does to several tasks must be the same at each replay."""
        self._unstarted: set[int] = set()
        """Rows whose group the server hasn't started yet: a check wouldn't find its workflow."""
        self._closed: list[GroupKey] = []
        """Groups whose workflows this execution saw end without a report."""

    @property
    def settled(self) -> bool:
        """Whether the server has started all groups that were requested."""
        return not self._starting

    @property
    def groups_out(self) -> list[GroupKey]:
        """The groups in flight whose workflows have been started."""
        out = self._state.out.items()
        return [self._key(c, o.attempt) for c, o in out if c not in self._unstarted]

    @property
    def has_closed(self) -> bool:
        """Whether groups ended without a report, and the store wasn't checked for them yet."""
        return bool(self._closed)

    def take_closed(self) -> list[GroupKey]:
        """Those groups; the caller checks the store for their results."""
        closed, self._closed = self._closed, []
        return closed

    def expect_rows(self, total: int) -> None:
        """The run has so many rows, over all epochs."""
        self._state.cursor.total = total

    def start(self) -> None:
        """Open admission; the policy version is live."""
        self.open = True
        self.refill()

    def close(self) -> None:
        """The run ends: start nothing, even if admission is opened or the run resumed."""
        self._is_over = True

    def halt(self) -> None:
        """Start nothing, not even what was requested in this workflow task."""
        self.close()
        for task in list(self._starting):
            task.cancel()

    def refill(self, *, after_completion: bool = False) -> None:
        """Admit rows while they fit; retries first, since their row is already reserved."""
        run, counters = self._run, self._state.counters
        if after_completion:
            counters.completion_refill_attempts += 1
        before = counters.rows_submitted
        if self.open and not self._is_over and not run.commands.paused and run.fatal is None:
            if not run.commands.stop or run.commands.drain:
                self._admit_retries()
            if not run.commands.stop:
                self._admit_rows()
        if after_completion:
            counters.completion_refill_rows_submitted += counters.rows_submitted - before
        self._observe()

    def on_released(self, message: Released) -> None:
        """Some calls of a group have ended; repeated and late messages change nothing."""
        out = self._out(message.key)
        if out is None or message.total <= out.released:
            return
        self._state.admission.release(message.total - out.released)
        out.released = message.total
        self.refill(after_completion=True)

    def on_group_finished(self, report: GroupReport) -> None:
        """A group has ended; repeated and late reports change nothing."""
        state = self._state
        if self._out(report.key) is None:
            return
        self._leave(report.key)
        self._run.progressed(workflow.time())
        state.counters.trajectory_drops += report.drops
        state.counters.recoverable_errors += sum(report.failures)
        state.reused_rollouts += report.reused
        state.breaker.record(report.failures)
        match report.result.outcome:
            case "accepted":
                state.admission.accept()
                state.counters.rows_accepted += 1
                state.queue.accept(report.result)
            case "filtered":
                state.counters.filter_drops += 1
                self._reject(report)
            case "incomplete":
                self._retry_or_reject(report)
            case "fatal":
                self._fail(report)
            case "cancelled":
                self._give_back(report.key)
        if state.breaker.tripped:
            error = f"circuit breaker: {state.breaker.tripped}{self._first_failure(report)}"
            self._run.fail(Fatal(error=error, error_type="CircuitBreakerOpen"))
        self.refill(after_completion=True)

    def on_group_dead(self, key: GroupKey) -> None:
        """A group's workflow ended without a result: its row is retried."""
        if self._out(key) is None:
            return
        workflow.logger.warning("group %s left no result; its row is retried", key.text)
        self._leave(key)
        self._history(key)
        self._state.retries.append(key.cursor)
        self.refill(after_completion=True)

    @property
    def fails(self) -> bool:
        """Whether a fatal error ends the run, now or before the next batch; any other holds it."""
        fatal, on_fatal = self._run.fatal, self._live.config.on_fatal
        if fatal is None or fatal.holds or on_fatal == "hold":
            return False
        return on_fatal == "fail" or not fatal.infrastructure

    async def settle_fatal(self) -> bool:
        """Act on a fatal error, between batches or before the open one is sealed.

        An error that doesn't end the run holds it, with all it has, until a person resumes it,
        skips the row or stops it. Returns whether the run was stopped while it was held.

        Raises:
            ApplicationError
        """
        run = self._run
        if self.fails:
            await self._count_failures()
        if run.fatal is not None and not self.fails:
            run.checkpoints.answer(run.fatal.held)
            run.enter("held", "resume, skip_row or stop")
            await workflow.wait_condition(
                lambda: run.fatal is None or run.commands.stop or self.fails
            )
        if run.fatal is None:
            return False
        if self.fails:
            raise ApplicationError(
                run.fatal.error,
                *([run.fatal.rollouts] if run.fatal.rollouts is not None else []),
                type=run.fatal.error_type,
                non_retryable=True,
            )
        run.note(f"stopped while it was held: {run.fatal.error}")
        run.fatal = None
        # A stop that drains waits for retries, which waited for this.
        self.refill()
        return True

    def resume(self) -> None:
        """Continue after a pause, or after the cause of a fatal error was fixed."""
        self._run.fatal = None
        self._state.breaker.reset()
        self.refill()

    def reconfigured(self) -> None:
        """Admit by the new limits from now on."""
        config, admission = self._live.config, self._state.admission
        admission.max_head_offpolicy_versions = config.max_head_offpolicy_versions
        admission.concurrency = config.max_concurrency_rollout_sample
        self.refill()

    def skip_row(self) -> GroupKey:
        """Reject the row that holds the run, and continue."""
        fatal = self._run.fatal
        assert fatal is not None and fatal.group is not None
        self._state.cursor.withdraw(fatal.group.cursor)
        self._resolve_rejected(fatal.group.cursor)
        self.resume()
        return fatal.group

    def cancel_all(self) -> None:
        """Cancel all groups in flight; each reports."""
        for cursor, out in self._state.out.items():
            key = self._key(cursor, out.attempt)
            self._track(self._cancel(key))

    def publish(self) -> None:
        """A new policy version is served: capacity opens."""
        self._state.admission.publish()
        self.refill()

    def take_rejected(self) -> RewardSum:
        """Completions of rows rejected since the last call."""
        rejected, self._state.rejected = self._state.rejected, RewardSum()
        return rejected

    def commit_batch(self) -> None:
        """The rows of the batch are trained."""
        for group in self._state.queue.commit():
            self._state.cursor.resolve(group.key.cursor)
            self._state.histories.pop(group.key.cursor, None)

    def close_window(self) -> dict[str, float]:
        """Time-weighted means since the previous publication, as `async/*` metrics."""
        means = self._state.gauges.close_window(workflow.time())
        return {f"async/{name}_mean": value for name, value in means.items()}

    def record_sample(self, *, force: bool = False) -> None:
        """Add a record to the producer stream, unless the last one is too recent."""
        now = workflow.time()
        if not force and now - self._state.sampled_at < SAMPLE_INTERVAL:
            return
        self._state.sampled_at = now
        self._recorder.add_producer_record(self._sample(now))

    def _admit_retries(self) -> None:
        state = self._state
        while state.retries and state.admission.can_retry():
            self._launch(state.retries.pop(0), state.admission.retry())

    def _admit_rows(self) -> None:
        state = self._state
        # A retry that waits for free calls goes first: rows admitted past it could starve it.
        while not state.retries and len(state.out) < MAX_GROUPS_OUT and state.admission.can_admit():
            cursor = state.cursor.take()
            if cursor is None:
                return
            state.counters.rows_submitted += 1
            self._launch(cursor, state.admission.admit())

    def _launch(self, cursor: int, version: int) -> None:
        history = self._state.histories.get(cursor)
        key = self._key(cursor, history.attempts if history else 0)
        if history is not None:
            history.attempts += 1
        self._state.out[cursor] = GroupOut(attempt=key.attempt, version=version)
        self._unstarted.add(cursor)
        self._track(self._start_group(key, version))

    def _key(self, cursor: int, attempt: int) -> GroupKey:
        return GroupKey(cursor=cursor, attempt=attempt, incarnation=self._run.incarnation)

    def _track(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._starting[task] = None
        task.add_done_callback(lambda done: self._starting.pop(done, None))

    async def _start_group(self, key: GroupKey, version: int) -> None:
        config, run = self._live.config, self._run.run
        history = self._state.histories.get(key.cursor)
        incomplete = 0 if history is None else history.incomplete
        try:
            child = await workflow.start_child_workflow(
                PromptGroup.run,
                GroupOrder(
                    run=run,
                    key=key,
                    version=version,
                    completions=config.completions_per_prompt,
                    rollout_timeout=config.rollout_timeout,
                    report_releases=config.max_concurrency_rollout_sample is not None,
                    fail_on_failure=config.on_any_rollout_failure == "fail",
                    last=incomplete >= config.max_incomplete_group_retries,
                ),
                id=group_workflow_id(run.id, key),
                parent_close_policy=ParentClosePolicy.ABANDON,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                execution_timeout=completion_limit(config.rollout_timeout) * GROUP_LIFETIME_FACTOR,
                search_attributes=self._attributes(key, version),
                static_summary=f"row {key.text} · policy v{version}",
            )
        except WorkflowAlreadyStartedError:
            # Ids are never reused within a run: this child is the run's own, and will report.
            return
        finally:
            self._unstarted.discard(key.cursor)
        self._run.progressed(workflow.time())
        child.add_done_callback(lambda task: self._on_child_closed(key, task))

    def _attributes(self, key: GroupKey, version: int) -> TypedSearchAttributes | None:
        """What finds the group in the UI; given at its start, they cost no event."""
        if not self._run.search_attributes:
            return None
        return TypedSearchAttributes(
            [
                SearchAttributePair(RUN, self._run.run.id),
                SearchAttributePair(ROW, key.cursor),
                SearchAttributePair(POLICY_VERSION, version),
            ]
        )

    def _on_child_closed(self, key: GroupKey, child: "asyncio.Task[None]") -> None:
        """A child that ended without a report (terminated, timed out) may have left a manifest."""
        error = None if child.cancelled() else child.exception()
        if self._out(key) is None or not (child.cancelled() or error):
            return
        why = "cancelled" if error is None else error.__cause__ or error
        workflow.logger.warning("group %s ended without a report (%s)", key.text, why)
        self._closed.append(key)

    async def _cancel(self, key: GroupKey) -> None:
        handle = workflow.get_external_workflow_handle(group_workflow_id(self._run.run.id, key))
        try:
            await handle.cancel()
        except ApplicationError:
            # It ended by itself; its report is on the way.
            workflow.logger.info("group %s has ended already", key.text)

    def _out(self, key: GroupKey) -> GroupOut | None:
        out = self._state.out.get(key.cursor)
        return out if out is not None and key == self._key(key.cursor, out.attempt) else None

    def _leave(self, key: GroupKey) -> None:
        """The group has ended, and with it the calls that it hasn't released."""
        out = self._state.out.pop(key.cursor)
        self._state.admission.release(self._live.config.completions_per_prompt - out.released)

    def _retry_or_reject(self, report: GroupReport) -> None:
        history = self._history(report.key)
        history.incomplete += 1
        if history.incomplete > self._live.config.max_incomplete_group_retries:
            self._reject(report)
            return
        self._state.counters.incomplete_group_retries += 1
        self._state.retries.append(report.key.cursor)

    def _reject(self, report: GroupReport) -> None:
        state, result = self._state, report.result
        state.admission.reject()
        state.rejected = state.rejected.plus(result.survivors, result.reward_sum)
        self._resolve_rejected(report.key.cursor)

    def _resolve_rejected(self, cursor: int) -> None:
        self._state.counters.rows_rejected += 1
        self._state.cursor.resolve(cursor)
        self._state.histories.pop(cursor, None)

    def _give_back(self, key: GroupKey) -> None:
        """The row will be issued again, as a new attempt."""
        self._history(key)
        self._state.admission.reject()
        self._state.cursor.give_back(key.cursor)

    def _history(self, key: GroupKey) -> RowHistory:
        return self._state.histories.setdefault(key.cursor, RowHistory(attempts=key.attempt + 1))

    def _fail(self, report: GroupReport) -> None:
        self._give_back(report.key)
        fatal = self._run.fatal
        if fatal is None:
            self._run.fail(_fatal(report))
        elif fatal.rollouts is not None:
            fatal.rollouts = fatal.rollouts.counting(report)

    def _first_failure(self, report: GroupReport) -> str:
        """The first failure of the group, as an addition to what follows from it."""
        if report.error is None:
            return ""  # the result was found in the store, which doesn't say
        error = report.error.removeprefix(f"run {self._run.run.id} · ")
        place = f"row {report.key.cursor} · completion {report.completion}"
        return f"; {error}" if place in error else f"; {place}: {error}"

    async def _count_failures(self) -> None:
        """If any failed rollout ends the run, let those in flight end, and count all failures.

        Not after the loss of the trainer: rollouts would wait for a snapshot that is gone.
        """
        run = self._run
        any_failure = self._live.config.on_any_rollout_failure == "fail"
        if not any_failure or run.fatal is None or run.fatal.group is None:
            return
        run.enter("failing", "the rollouts in flight, to count what fails")
        await workflow.wait_condition(
            lambda: not self._state.out or run.commands.stop or run.lease.end is not None
        )

    def _observe(self) -> None:
        self._state.gauges.set(workflow.time(), self._gauge_values())
        self.record_sample()

    def _gauge_values(self) -> dict[str, float]:
        admission = self._state.admission
        values = {
            "in_flight_samples": admission.in_flight,
            "admission_capacity_samples": admission.capacity,
            "staleness_capacity_samples": admission.staleness_capacity,
        }
        if admission.concurrency_capacity is not None:
            values["concurrency_capacity_samples"] = admission.concurrency_capacity
        return {name: float(value) for name, value in values.items()}

    def _sample(self, now: float) -> dict[str, Value]:
        run, state = self._run, self._state
        counters: dict[str, Number] = state.counters.model_dump()
        values: dict[str, Value] = {
            "elapsed_time_s": round(now - run.started_at, 3),
            "no_progress_s": round(now - run.progress_at, 3),
            "published_version": run.version,
            "breaker_consecutive_failures": state.breaker.consecutive,
            "breaker_tripped": state.breaker.tripped is not None,
            **self._gauge_values(),
            **{f"{name}_total": count for name, count in counters.items()},
        }
        if run.stall(now):
            values["waiting_for"] = run.waiting_for
        return values


def _fatal(report: GroupReport) -> Fatal:
    first = error = report.error or "a rollout failed"
    if report.error_type == ROLLOUT_FAILED:
        error = (
            f"row {report.key.cursor} · completion {report.completion} failed, and "
            f"on_any_rollout_failure is 'fail': {first}"
        )
    return Fatal(
        error=error,
        error_type=report.error_type or ROLLOUT_FAILED,
        group=report.key,
        rollouts=RolloutsFailed(
            version=report.result.version, evaluation=False, failed=report.failed, first=first
        ),
    )
