"""The producer: keeps rows in flight, and takes in what becomes of them.

Drives admission, cursor, queue, breaker and gauges; starts and cancels PromptGroups. Every method
that changes something tries to refill, so that capacity never lies idle. Doesn't own optimizer
steps: those take groups out of the queue.
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
    from activities.messages import PRODUCER_METRICS, ProducerSample
    from activities.search_attributes import POLICY_VERSION, ROW, RUN
    from everburn.records.ids import GroupKey, group_workflow_id
    from everburn.scheduling.queue import QueuedGroup
    from workflows.children.prompt_group import PromptGroup, completion_limit
    from workflows.children.retries import MAX_FAILURES, MAX_LOSSES
    from workflows.messages import (
        ROLLOUT_FAILED,
        GroupOrder,
        GroupReport,
        Released,
        RolloutsFailed,
    )
    from workflows.run.live_config import Settings
    from workflows.run.state import Fatal, GroupOut, RowHistory, RunState

SAMPLE_INTERVAL = 10.0
"""Seconds between records of the producer stream, at least."""
MAX_GROUPS_OUT = 512
"""Pending children of one workflow; a larger window waits in admission."""
MAX_WAITING_FOR = 200
"""Characters of what a run waits for, in a record of a standstill."""
GROUP_LIFETIME_FACTOR = MAX_FAILURES + MAX_LOSSES + 2
"""A group's execution timeout in limits of a completion: room for all attempts that count."""


class Producer:
    def __init__(self, state: RunState, settings: Settings) -> None:
        self._state = state
        self._settings = settings
        self.open = False
        """Admission is closed until weights and version are live."""
        self._is_over = False
        self._starting: dict[asyncio.Task[None], None] = {}
        """In order: what a workflow does to several tasks must be the same at each replay."""
        self._unborn: set[int] = set()
        """Rows whose group the server hasn't started yet: looked for, it wouldn't be found."""
        self._closed: list[GroupKey] = []
        """Groups whose workflows ended without a report, as the server tells this execution."""

    @property
    def settled(self) -> bool:
        """Whether all children that were asked for have been started."""
        return not self._starting

    @property
    def groups_out(self) -> list[GroupKey]:
        """The groups in flight whose workflows have been started."""
        out = self._state.out.items()
        return [GroupKey(cursor=c, attempt=o.attempt) for c, o in out if c not in self._unborn]

    @property
    def has_closed(self) -> bool:
        """Whether there are groups that ended without a report and haven't been looked for."""
        return bool(self._closed)

    def take_closed(self) -> list[GroupKey]:
        """Those groups; the caller looks whether they have left their fate in the store."""
        closed, self._closed = self._closed, []
        return closed

    def start(self) -> None:
        """Open admission; the policy version is live."""
        self.open = True
        self.refill()

    def close(self) -> None:
        """The run ends: begin nothing any more, whoever opens admission or resumes the run."""
        self._is_over = True

    def halt(self) -> None:
        """Begin nothing any more, nor what was asked for in this very workflow task."""
        self.close()
        for task in list(self._starting):
            task.cancel()

    def refill(self, *, after_completion: bool = False) -> None:
        """Admit rows while they fit; retries first, since their row is already reserved."""
        state = self._state
        if after_completion:
            state.counters.completion_refill_attempts += 1
        before = state.counters.rows_submitted
        if self.open and not self._is_over and not state.paused and state.fatal is None:
            if not state.stop or state.drain:
                self._admit_retries()
            if not state.stop:
                self._admit_rows()
        if after_completion:
            admitted = state.counters.rows_submitted - before
            state.counters.completion_refill_rows_submitted += admitted
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
        out = self._out(report.key)
        if out is None:
            return
        del state.out[report.key.cursor]
        state.progressed(workflow.time())
        state.admission.release(self._settings.config.completions_per_prompt - out.released)
        state.counters.trajectory_drops += report.drops
        state.counters.recoverable_errors += sum(report.failures)
        state.reused_rollouts += report.reused
        state.breaker.record(report.failures)
        match report.fate:
            case "accepted":
                self._accept(report)
            case "filtered":
                state.counters.filter_drops += 1
                self._reject(report)
            case "incomplete":
                self._retry_or_reject(report)
            case "fatal":
                self._fail(report)
            case "cancelled":
                self._give_back(report.key)
        if state.breaker.tripped and state.fatal is None:
            error = f"circuit breaker: {state.breaker.tripped}{_of(report)}"
            state.fatal = Fatal(error=error, error_type="CircuitBreakerOpen")
        self.refill(after_completion=True)

    @property
    def fails(self) -> bool:
        """Whether a fatal error ends the run, now or before the next batch; any other holds it."""
        fatal, on_fatal = self._state.fatal, self._settings.config.on_fatal
        if fatal is None or fatal.holds or on_fatal == "hold":
            return False
        return on_fatal == "fail" or not fatal.infrastructure

    async def settle_fatal(self) -> bool:
        """Between batches, or before the open one is sealed: act on a fatal error.

        Where `fails` doesn't end the run, it waits, keeping what it has, until a person resumes
        it, skips the row or stops it. Returns whether it was stopped, with what was wrong still
        being so.

        Raises:
            ApplicationError
        """
        state = self._state
        if self.fails:
            await self._count_failures()
        if state.fatal is not None and not self.fails:
            state.refuse_checkpoint(state.fatal.held)
            state.phase = "held"
            state.waiting_for = "resume, skip_row or stop"
            await workflow.wait_condition(lambda: state.fatal is None or state.stop or self.fails)
        if state.fatal is None:
            return False
        if self.fails:
            raise ApplicationError(
                state.fatal.error,
                *([state.fatal.rollouts] if state.fatal.rollouts is not None else []),
                type=state.fatal.error_type,
                non_retryable=True,
            )
        state.note(f"stopped while it was held: {state.fatal.error}")
        state.fatal = None
        # A stop that drains waits for rows that are begun again, and they waited for this.
        self.refill()
        return True

    def resume(self) -> None:
        """End a pause; the cause of a fatal error, if there was one, has been mended."""
        self._state.paused = False
        self._state.fatal = None
        self._state.breaker.reset()
        self.refill()

    def reconfigured(self) -> None:
        """Admit by new limits from now on."""
        config, admission = self._settings.config, self._state.admission
        admission.max_head_offpolicy_versions = config.max_head_offpolicy_versions
        admission.concurrency = config.max_concurrency_rollout_sample
        self.refill()

    def skip_row(self) -> GroupKey:
        """Reject the row that holds the run, and go on."""
        fatal = self._state.fatal
        assert fatal is not None and fatal.group is not None
        self._state.cursor.withdraw(fatal.group.cursor)
        self._resolve_rejected(fatal.group.cursor)
        self.resume()
        return fatal.group

    def cancel_all(self) -> None:
        """Ask all groups in flight to end; each reports."""
        for cursor, out in self._state.out.items():
            key = GroupKey(cursor=cursor, attempt=out.attempt)
            self._track(self._cancel(key))

    def close_window(self) -> dict[str, float]:
        """Time-weighted means since the previous publication, as `async/*` metrics."""
        means = self._state.gauges.close_window(workflow.time())
        return {f"async/{name}_mean": value for name, value in means.items()}

    def record_sample(self, *, force: bool = False) -> None:
        """Note a record of the producer stream, unless the last one is too recent."""
        state, now = self._state, workflow.time()
        if not force and now - state.producer_sample_at < SAMPLE_INTERVAL:
            return
        state.producer_sample_at = now
        state.producer_samples.append(
            ProducerSample(
                index=state.producer_index,
                values=self._sample_values(now),
                waiting_for=state.waiting_for[:MAX_WAITING_FOR] if state.standstill(now) else None,
            )
        )
        state.producer_index += 1

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
        history = self._state.again.get(cursor)
        attempt = history.attempts if history else self._state.first_attempt
        key = GroupKey(cursor=cursor, attempt=attempt)
        if history is not None:
            history.attempts += 1
        self._state.out[cursor] = GroupOut(attempt=key.attempt, version=version)
        self._unborn.add(cursor)
        self._track(self._start_group(key, version))

    def _track(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._starting[task] = None
        task.add_done_callback(lambda done: self._starting.pop(done, None))

    async def _start_group(self, key: GroupKey, version: int) -> None:
        config, run = self._settings.config, self._state.run
        history = self._state.again.get(key.cursor)
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
            # Ids are never reused within a run, so this one is ours: it will report.
            return
        finally:
            self._unborn.discard(key.cursor)
        self._state.progressed(workflow.time())
        child.add_done_callback(lambda task: self._on_child_closed(key, task))

    def _attributes(self, key: GroupKey, version: int) -> TypedSearchAttributes | None:
        """By what the group is found in the UI; given at its start, they cost no event."""
        state = self._state
        if not state.search_attributes:
            return None
        return TypedSearchAttributes(
            [
                SearchAttributePair(RUN, state.run.id),
                SearchAttributePair(ROW, key.cursor),
                SearchAttributePair(POLICY_VERSION, version),
            ]
        )

    def _on_child_closed(self, key: GroupKey, child: "asyncio.Task[None]") -> None:
        """A child that ended without reporting (terminated, timed out) may have a fate all the
        same."""
        error = None if child.cancelled() else child.exception()
        if self._out(key) is None or not (child.cancelled() or error):
            return
        why = "cancelled" if error is None else error.__cause__ or error
        workflow.logger.warning("group %s ended without a report (%s)", key.text, why)
        self._closed.append(key)

    def on_group_dead(self, key: GroupKey) -> None:
        """A group's workflow ended without leaving anything: the row is run again."""
        if self._out(key) is None:
            return
        workflow.logger.warning("group %s left nothing; its row is run again", key.text)
        out = self._state.out.pop(key.cursor)
        self._state.admission.release(self._settings.config.completions_per_prompt - out.released)
        self._again(key)
        self._state.retries.append(key.cursor)
        self.refill(after_completion=True)

    async def _cancel(self, key: GroupKey) -> None:
        handle = workflow.get_external_workflow_handle(group_workflow_id(self._state.run.id, key))
        try:
            await handle.cancel()
        except ApplicationError:
            # It ended by itself; its report is on the way.
            workflow.logger.info("group %s has ended already", key.text)

    def _accept(self, report: GroupReport) -> None:
        state = self._state
        state.admission.accept()
        state.counters.rows_accepted += 1
        state.queue.accept(
            QueuedGroup(
                c=report.key.cursor,
                a=report.key.attempt,
                v=report.version,
                n=report.survivors,
                d=report.datums,
            )
        )

    def _retry_or_reject(self, report: GroupReport) -> None:
        key = report.key
        history = self._again(key)
        history.incomplete += 1
        if history.incomplete > self._settings.config.max_incomplete_group_retries:
            self._reject(report)
            return
        self._state.counters.incomplete_group_retries += 1
        self._state.retries.append(key.cursor)

    def _reject(self, report: GroupReport) -> None:
        state = self._state
        state.admission.reject()
        state.rejected = state.rejected.plus(report.survivors, report.reward_sum)
        self._resolve_rejected(report.key.cursor)

    async def _count_failures(self) -> None:
        """Where any failure ends the run, the phase ends first: all that fails is counted.

        As far as it has ended, where the trainer is lost meanwhile: rollouts would wait for a
        snapshot that nobody brings back any more.
        """
        state = self._state
        any_failure = self._settings.config.on_any_rollout_failure == "fail"
        if not any_failure or state.fatal is None or state.fatal.group is None:
            return
        state.phase, state.waiting_for = "failing", "the rollouts in flight, to count what fails"
        await workflow.wait_condition(
            lambda: not state.out or state.stop or state.lease_end is not None
        )

    def _resolve_rejected(self, cursor: int) -> None:
        self._state.counters.rows_rejected += 1
        self._state.cursor.resolve(cursor)
        self._state.again.pop(cursor, None)

    def _give_back(self, key: GroupKey) -> None:
        """The row will be issued again, as a new attempt."""
        self._again(key)
        self._state.admission.reject()
        self._state.cursor.give_back(key.cursor)

    def _again(self, key: GroupKey) -> RowHistory:
        return self._state.again.setdefault(key.cursor, RowHistory(attempts=key.attempt + 1))

    def _fail(self, report: GroupReport) -> None:
        self._give_back(report.key)
        fatal = self._state.fatal
        if fatal is None:
            first = error = report.error or "a rollout failed"
            if report.error_type == ROLLOUT_FAILED:
                error = (
                    f"row {report.key.cursor} · completion {report.completion} failed, and "
                    f"on_any_rollout_failure is 'fail': {first}"
                )
            self._state.fatal = Fatal(
                error=error,
                error_type=report.error_type or ROLLOUT_FAILED,
                group=report.key,
                rollouts=RolloutsFailed(
                    version=report.version, evaluation=False, failed=report.failed, first=first
                ),
            )
        elif fatal.rollouts is not None:
            fatal.rollouts = fatal.rollouts.counting(report)

    def _out(self, key: GroupKey) -> GroupOut | None:
        out = self._state.out.get(key.cursor)
        return out if out is not None and out.attempt == key.attempt else None

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

    def _sample_values(self, now: float) -> list[float | int | bool | None]:
        state = self._state
        values: dict[str, float | int | bool | None] = {
            "elapsed_time_s": round(now - state.started_at, 3),
            "no_progress_s": round(now - state.progress_at, 3),
            "published_version": state.admission.version,
            "breaker_consecutive_failures": state.breaker.consecutive,
            "breaker_tripped": state.breaker.tripped is not None,
        }
        values |= self._gauge_values()
        values |= {f"{name}_total": n for name, n in state.counters.model_dump().items()}
        return [values.get(name) for name in PRODUCER_METRICS]


def _of(report: GroupReport) -> str:
    """What has failed first in a group, to be added to what follows from it."""
    if report.error is None:
        return ""  # its fate was found in the store, which doesn't say
    place = f"row {report.key.cursor} · completion {report.completion}"
    return f"; {report.error}" if place in report.error else f"; {place}: {report.error}"
