"""TrainRun: one training run, from its configuration to its result.

Owns a run from start to cleanup, and its messages. Wires the parts that own the
rest. Its id is the run's id; `temporal workflow start --type TrainRun --input-file run.json` is all
it takes.
"""

import asyncio
import contextlib
import itertools
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    FailureError,
    is_cancelled_exception,
)
from temporalio.workflow import ContinueAsNewVersioningBehavior

with workflow.unsafe.imports_passed_through():
    from activities.contracts import RolloutContract
    from activities.failure_types import FailureKind, kind_of, message_of
    from activities.messages import Prepared
    from everburn.config import ConfigError, RunConfig, parse_config, reconfigured
    from everburn.records.commands import Ending
    from everburn.records.ids import RunRef
    from workflows.messages import (
        EvaluationReport,
        GroupReport,
        LeaseEnded,
        LeaseGranted,
        LeaseWaiting,
        Released,
        RunResult,
        Status,
        StopRequest,
    )
    from workflows.queues import ROLLOUT_QUEUE
    from workflows.reset_guard import ResetGuard
    from workflows.run.live_config import LiveConfig
    from workflows.run.parts import RunParts
    from workflows.run.recovery import Recovery, backoff
    from workflows.run.session import LeaseFailedError
    from workflows.run.shutdown import RunEnding
    from workflows.run.start import FirstLease
    from workflows.run.state import RunState
    from workflows.run.step import OptimizerStep, Taken
    from workflows.run.ui import RunPage, result_of, status_of
    from workflows.run.watchdog import Watchdog

MAX_HISTORY = 3_000
"""Events after which the run continues as new between steps: replay costs 0.4 ms per event, and it
is part of every recovery."""
FINISHING = "the run is ending: it saves its final state by itself, and nothing else can change"
UNWINDING = "the run is ending: it was cancelled, or has failed, and saves nothing any more"
PREPARE_ATTEMPTS = RetryPolicy(
    maximum_attempts=5, non_retryable_error_types=[FailureKind.WORKER_UNFIT]
)
"""A name that one worker can't resolve fails the run: another worker might resolve it to something
else."""
FULL_WAIT = timedelta(seconds=5)
"""Before a task is prepared again after the store was full."""


@workflow.defn
class TrainRun:
    @workflow.init
    def __init__(self, config: Any = None, state: RunState | None = None) -> None:
        self._config_error: str | None = None
        self._guard = ResetGuard(self._halt)
        self._ending: str | None = None
        """Why a command is refused, once the run ends."""
        try:
            live = LiveConfig(parse_config(config))
        except ConfigError as error:
            # Raised here, it would fail the workflow task forever; `run` fails the run instead.
            self._config_error = str(error)
            return
        run = RunRef(store=live.config.store, id=workflow.info().workflow_id)
        self._state = state or RunState.initial(run, live.config, workflow.time())
        self._parts = RunParts.wired(self._state, live)
        self._recovery = Recovery(self._parts)
        self._watchdog = Watchdog(self._parts)
        self._page = RunPage(self._state)
        if self._guard.was_reset:
            self._halt()

    @property
    def _config(self) -> RunConfig:
        return self._parts.config

    @workflow.run
    async def run(self, config: Any = None, state: RunState | None = None) -> RunResult:
        """Train until the rows are done, or the run is stopped.

        config: a RunConfig as JSON. state: of the execution that this one continues; without a
        lease it was rebuilt from the folder of a run that had ended.

        Raises:
            ApplicationError: the run failed; its type says how.
        """
        if self._config_error is not None:
            raise ApplicationError(self._config_error, type="InvalidConfig", non_retryable=True)
        self._guard.watch()
        beginning = None
        if state is None or state.lease.grant is None:
            # First of all tasks, so that the folder is the first thing that is asked of the server.
            beginning = asyncio.create_task(self._begin(config, first=state is None))
        background = [
            asyncio.create_task(self._page.keep()),
            asyncio.create_task(self._watchdog.watch()),
        ]
        try:
            if beginning is None:
                self._parts.producer.start()
                begun = True
            else:
                begun = await self._has_begun(beginning)
            if begun:
                await self._train()
            await self._finish(begun)
            return result_of(self._state)
        except workflow.ContinueAsNewError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if not self._guard.was_reset:
                await self._unwind(error)
            if self._guard.was_reset:
                raise self._guard.error() from None
            failure = _failure(error)
            if failure is error:
                # Raised as it is, with its own cause: that identifies a cancellation.
                raise
            raise failure from error
        finally:
            for task in background:
                task.cancel()

    def _halt(self) -> None:
        if self._config_error is None:
            self._parts.producer.halt()
            self._parts.recorder.halt()

    # From start to end

    async def _begin(self, config: dict[str, object], *, first: bool) -> None:
        """Everything before the first step. first: whether the run isn't resumed or forked."""
        problem = self._config.origin_problem() if first else None
        if problem is not None:
            raise ApplicationError(problem, type="InvalidConfig", non_retryable=True)
        state, parts = self._state, self._parts
        state.enter("starting" if first else "resuming", "the run's folder")
        await self._take_folder(config)
        state.enter("preparing" if first else "resuming", "a rollout worker that loads the task")
        prepared = await self._prepare()
        for note in prepared.notes:
            state.note(note)
        state.evaluation_rows = prepared.evaluation_rows
        if first:
            parts.producer.expect_rows(prepared.rows * self._config.epochs)
            await FirstLease(parts, self._recovery).acquire()
            parts.producer.record_sample(force=True)
            parts.producer.start()
        else:
            await self._recovery.restore(LeaseFailedError("the run was resumed", "Resumed"))
            await parts.producer.settle_fatal()
            state.step.publish(state.step.snapshot, workflow.time())
            parts.producer.record_sample(force=True)
        await parts.evaluations.start_first(state.version)

    async def _has_begun(self, beginning: "asyncio.Task[None]") -> bool:
        """Wait for the beginning; false if the run was stopped meanwhile."""
        state = self._state
        try:
            await workflow.wait_condition(lambda: beginning.done() or state.commands.stop)
        finally:
            stopped = not beginning.done()
            beginning.cancel()
            await workflow.wait([beginning])
        if stopped:
            self._parts.recorder.give_up()
            state.note("stopped before it began to train")
            return False
        await beginning
        return True

    async def _take_folder(self, config: dict[str, object]) -> None:
        """Wait until the folder can be written; the status says why it can't."""
        for attempts in itertools.count():
            try:
                created = await self._parts.recorder.create_run(config)
            except ActivityError as error:
                final = isinstance(error.cause, ApplicationError) and error.cause.non_retryable
                if final or is_cancelled_exception(error):
                    raise
                self._state.wait_for(f"the run's folder: {message_of(error)}")
                await workflow.sleep(backoff(attempts), summary="the run's folder")
            else:
                self._state.search_attributes = created.search_attributes
                return

    async def _prepare(self) -> Prepared:
        while True:
            try:
                prepared: Prepared = await workflow.execute_activity_method(
                    RolloutContract.prepare_task,
                    self._state.run,
                    task_queue=ROLLOUT_QUEUE,
                    start_to_close_timeout=timedelta(minutes=10),
                    heartbeat_timeout=timedelta(seconds=10),
                    retry_policy=PREPARE_ATTEMPTS,
                    summary=f"prepare {self._config.rollout.name}",
                )
                return prepared
            except ActivityError as error:
                if kind_of(error.cause) != FailureKind.STORE_FULL:
                    raise
                text = "space in the store: the rows that the run trains on can't be written"
                self._state.wait_for(text)
                await workflow.sleep(FULL_WAIT, summary=text)

    async def _train(self) -> None:
        parts, state = self._parts, self._state
        while (taken := await self._take_step()) != "none":
            if taken == "taken":
                await parts.producer.settle_fatal()
                if parts.evaluations.due(state.version):
                    await parts.evaluations.start(state.version)
            if taken == "open" or self._history_is_long() or self._is_outdated():
                await self._continue_as_new()

    async def _take_step(self) -> Taken:
        """One step, through as many failed leases as it takes."""
        while True:
            try:
                return await OptimizerStep(self._parts).run()
            except LeaseFailedError as error:
                if not await self._recovery.recover(error):
                    return "none"

    async def _finish(self, begun: bool) -> None:
        """Everything after the last step, from committed state."""
        self._end_steps(FINISHING)
        await RunEnding(self._parts, self._recovery).finish(begun)
        self._state.enter("stopped" if self._state.commands.stop else "completed")
        self._page.show()

    def _end_steps(self, why: str) -> None:
        """Start no rows, and answer the wait for a checkpoint."""
        self._ending = why
        self._parts.producer.close()
        self._state.checkpoints.answer(why)

    async def _unwind(self, error: BaseException) -> None:
        """Release everything that costs, also if the run was cancelled."""
        self._end_steps(UNWINDING)
        cancelled = is_cancelled_exception(error)
        self._state.enter("cancelling" if cancelled else "failing", "cleanup")
        ending: Ending = "cancelled" if cancelled else "failed"
        why = ending if cancelled else f"failed: {_failure(error)}"
        unwinding = RunEnding(self._parts, self._recovery).clean_up(ending, why)
        cleanup = asyncio.create_task(unwinding)
        while not cleanup.done() and not self._guard.was_reset:
            # A second cancellation must not interrupt the cleanup of the first.
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asyncio.shield(cleanup)
        if not cleanup.done():
            cleanup.cancel()
        elif not cleanup.cancelled() and cleanup.exception() is not None:
            workflow.logger.warning("cleanup failed: %s", cleanup.exception())
        self._state.wait_for("")

    # Continue-as-new

    def _history_is_long(self) -> bool:
        info = workflow.info()
        long = info.get_current_history_length() > MAX_HISTORY
        return long or info.is_continue_as_new_suggested()

    def _is_outdated(self) -> bool:
        """Whether workers of another build are to take over."""
        return workflow.info().is_target_worker_deployment_version_changed()

    async def _continue_as_new(self) -> None:
        """Continue in a new execution. Children keep running, and report to the run's id."""
        state, parts = self._state, self._parts
        await workflow.wait_condition(
            lambda: (
                state.checkpoints.requested
                or (
                    parts.producer.settled
                    and parts.recorder.idle
                    and not self._watchdog.checking
                    and workflow.all_handlers_finished()
                )
            )
        )
        if state.checkpoints.requested:
            # Its handler waits for the next step, which begins with it.
            return
        versioned = workflow.info().get_current_deployment_version() is not None
        workflow.continue_as_new(
            args=[self._config.model_dump(mode="json"), state],
            # A run is pinned to the build that it began on; only here can it change.
            initial_versioning_behavior=ContinueAsNewVersioningBehavior.AUTO_UPGRADE
            if versioned
            else None,
        )

    # Messages

    @workflow.signal
    def group_finished(self, report: GroupReport) -> None:
        """From a PromptGroup: it has ended."""
        self._parts.producer.on_group_finished(report)

    @workflow.signal
    def released(self, message: Released) -> None:
        """From a PromptGroup: some of its rollout calls have ended."""
        self._parts.producer.on_released(message)

    @workflow.signal
    def lease_waiting(self, message: LeaseWaiting) -> None:
        """From the TrainerLease: what it waits for."""
        self._parts.trainer.on_waiting(message)

    @workflow.signal
    def lease_granted(self, message: LeaseGranted) -> None:
        """From the TrainerLease: a session is open."""
        self._parts.trainer.on_granted(message)

    @workflow.signal
    def lease_ended(self, message: LeaseEnded) -> None:
        """From the TrainerLease: the session is gone."""
        self._parts.trainer.on_ended(message)

    @workflow.signal
    async def evaluation_finished(self, report: EvaluationReport) -> None:
        """From an Evaluation: its metrics, or why there are none."""
        await self._parts.evaluations.on_finished(report)

    @workflow.signal(description='Stop gracefully; {"drain": true} awaits rollouts in flight.')
    async def stop(self, request: StopRequest | None = None) -> None:
        """Admit nothing new, finish a sealed step, save, evaluate, clean up."""
        if self._config_error is None:
            drain = request is not None and request.drain
            self._state.commands.stop, self._state.commands.drain = True, drain
            await self._parts.recorder.command("stop, drained" if drain else "stop")

    @workflow.update(description="Admit nothing new; what is in flight is finished and trained.")
    async def pause(self) -> str:
        """Close admission until `resume`."""
        self._state.commands.paused = True
        await self._parts.recorder.command("pause")
        return "paused"

    @pause.validator
    def _check_pause(self) -> None:
        self._check_not_ending()
        if self._state.commands.paused:
            raise ValueError("the run is paused already")

    @workflow.update(description="Continue after a pause, or after a fatal error was fixed.")
    async def resume(self) -> str:
        """End a pause; clear the error that holds the run, and retry what failed."""
        self._state.commands.paused = False
        self._parts.producer.resume()
        await self._parts.recorder.command("resume")
        return "resumed"

    @resume.validator
    def _check_resume(self) -> None:
        self._check_not_failing()
        if not self._state.commands.paused and self._state.fatal is None:
            raise ValueError("the run is neither paused nor held")

    @workflow.update(description="Save a checkpoint of the last committed step; answers its path.")
    async def checkpoint(self) -> str:
        """Save now, or at the end of the step that is being trained."""
        checkpoints = self._state.checkpoints
        checkpoints.requested = True
        await workflow.wait_condition(lambda: not checkpoints.requested)
        error, path = checkpoints.error, checkpoints.eligible[-1].path
        if error is not None:
            await self._parts.recorder.command(f"checkpoint: {error}")
            raise ApplicationError(error, type="NoCheckpoint")
        await self._parts.recorder.command("checkpoint", checkpoint=path)
        return path

    @checkpoint.validator
    def _check_checkpoint(self) -> None:
        self._check_not_ending()
        if not self._state.checkpoints.eligible:
            raise ValueError("the run hasn't saved its initial state yet")
        self._check_not_failing()
        if self._state.fatal is not None:
            raise ValueError(self._state.fatal.held)

    @workflow.update(description="Change the learning rate, O, C, intervals, ... of a running run.")
    async def reconfigure(self, changes: dict[str, Any]) -> str:
        """Apply changes from the next decision on, and record them."""
        names = ", ".join(sorted(changes))
        self._parts.live.config = reconfigured(self._config, changes)
        self._parts.producer.reconfigured()
        await self._parts.recorder.command(f"reconfigure {names}", changes=changes)
        return f"changed {names}"

    @reconfigure.validator
    def _check_reconfigure(self, changes: dict[str, Any]) -> None:
        self._check_not_ending()
        reconfigured(self._config, changes)

    @workflow.update(description="Reject the row that failed, and continue.")
    async def skip_row(self) -> str:
        """Clear the error that holds the run; its row counts as rejected."""
        self._state.commands.paused = False
        group = self._parts.producer.skip_row()
        await self._parts.recorder.skip_group(group, self._state.version)
        await self._parts.recorder.command(f"skip_row {group.text}")
        return f"skipped row {group.text}"

    @skip_row.validator
    def _check_skip_row(self) -> None:
        self._check_not_failing()
        fatal = self._state.fatal
        if fatal is None:
            raise ValueError("the run isn't held: there is no row to skip")
        if fatal.group is None:
            raise ValueError(f"no row is the cause: {fatal.error}; fix it and resume, or stop")

    def _check_running(self) -> None:
        if self._config_error is not None:
            raise ValueError("the run's configuration is invalid")

    def _check_not_failing(self) -> None:
        self._check_running()
        fatal = self._state.fatal
        if fatal is not None and self._parts.producer.fails:
            raise ValueError(f"the run fails: {fatal.error}")

    def _check_not_ending(self) -> None:
        self._check_running()
        if self._ending is not None:
            raise ValueError(self._ending)

    @workflow.query(description="Where the run is.")
    def status(self) -> Status:
        if self._config_error is not None:
            raise ApplicationError(self._config_error, type="InvalidConfig")
        return status_of(self._state)


def _failure(error: BaseException) -> BaseException:
    """The run's failure as Temporal shows it: the original error, with its type."""
    if isinstance(error, LeaseFailedError):
        return ApplicationError(str(error), type=error.kind, non_retryable=True)
    if isinstance(error, ActivityError) and isinstance(error.cause, ApplicationError):
        cause = error.cause
        return ApplicationError(cause.message, type=cause.type, non_retryable=True)
    if isinstance(error, FailureError) or is_cancelled_exception(error):
        return error
    # A defect of this code: raised as it is, it would fail the workflow task forever.
    text = f"{type(error).__name__}: {error}"
    return ApplicationError(text, type="InternalError", non_retryable=True)
