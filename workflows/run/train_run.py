"""TrainRun: one training run, from its configuration to its result.

Owns the run's life (start, steps, end, cleanup), its messages and its status. Wires the parts that
own the rest: producer, optimizer step, trainer session, evaluations, recorder. Its id is the run's
id; `temporal workflow start --type TrainRun --input-file run.json` is all it takes.
"""

import asyncio
import contextlib
import itertools
import math
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy, SearchAttributeUpdate
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
    from activities.search_attributes import POLICY_VERSION, REWARD, RUN, STEP
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
    from workflows.run.evaluations import Evaluations
    from workflows.run.live_config import Settings
    from workflows.run.producer import Producer
    from workflows.run.recorder import Recorder
    from workflows.run.recovery import Recovery, backoff
    from workflows.run.session import LeaseLostError, TrainerSession
    from workflows.run.shutdown import RunEnding
    from workflows.run.start import FirstLease
    from workflows.run.state import RunState
    from workflows.run.step import OptimizerStep, Outcome
    from workflows.run.ui import describe
    from workflows.run.watchdog import Watchdog

MAX_HISTORY = 3_000
"""Events after which the run continues as new once it has taken a step: replay costs 0.4 ms per
event, and it is part of every recovery."""
FINISHING = "the run is ending: it saves its final state by itself, and nothing else can change"
UNWINDING = "the run is ending: it was cancelled, or has failed, and saves nothing any more"
PREPARE_ATTEMPTS = RetryPolicy(
    maximum_attempts=5, non_retryable_error_types=[FailureKind.WORKER_UNFIT]
)
"""A name that one worker can't resolve fails the run: another worker might resolve it to something
else."""
FULL_WAIT = timedelta(seconds=5)
"""Before a task is prepared again for which there was no space."""


@workflow.defn
class TrainRun:
    @workflow.init
    def __init__(self, config: Any = None, state: RunState | None = None) -> None:
        self._config_error: str | None = None
        self._guard = ResetGuard(self._halt)
        self._shown: tuple[int, float | None] | None = None
        self._ending: str | None = None
        """What is answered to who wants a change, once the run ends."""
        try:
            self._settings = Settings(parse_config(config))
        except ConfigError as error:
            # Failing here would fail the workflow task, for ever; `run` fails the run instead.
            self._config_error = str(error)
            return
        run = RunRef(store=self._config.store, id=workflow.info().workflow_id)
        self._state = state or RunState.initial(run, self._config, workflow.time())
        self._wire(self._settings, self._state)

    @property
    def _config(self) -> RunConfig:
        return self._settings.config

    def _wire(self, settings: Settings, state: RunState) -> None:
        self._recorder = Recorder(state)
        self._producer = Producer(state, settings)
        self._trainer = TrainerSession(state, settings.config)
        self._evaluations = Evaluations(state, settings, self._recorder)
        self._watchdog = Watchdog(
            state, self._producer, self._trainer, self._evaluations, self._recorder
        )
        self._recovery = Recovery(state, settings, self._trainer, self._producer, self._evaluations)
        if self._guard.was_reset:
            self._halt()

    @workflow.run
    async def run(self, config: Any = None, state: RunState | None = None) -> RunResult:
        """Train to the end of the rows, or to a stop.

        config: a RunConfig as JSON. state: of the execution that this one continues; without a
        lease it was rebuilt from the folder of a run that had ended.

        Raises:
            ApplicationError: the run failed; its type says how.
        """
        if self._config_error is not None:
            raise ApplicationError(self._config_error, type="InvalidConfig", non_retryable=True)
        self._guard.watch()
        beginning = None
        if state is None or state.grant is None:
            # Before its company: what is asked of the server first is the folder.
            beginning = asyncio.create_task(self._begin(config, anew=state is None))
        company = [
            asyncio.create_task(self._narrate()),
            asyncio.create_task(self._watchdog.watch()),
        ]
        try:
            if beginning is None:
                self._producer.start()
                begun = True
            else:
                begun = await self._has_begun(beginning)
            if begun:
                await self._train()
            await self._finish(begun)
            return self._result()
        except workflow.ContinueAsNewError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if not self._guard.was_reset:
                await self._unwind(error)
            if self._guard.was_reset:
                raise self._guard.error() from None
            failure = self._failure(error)
            if failure is error:
                # As it is: it keeps its own cause, by which a cancellation is told.
                raise
            raise failure from error
        finally:
            for task in company:
                task.cancel()

    def _halt(self) -> None:
        if self._config_error is None:
            self._producer.halt()
            self._recorder.halt()

    # Life

    async def _begin(self, config: dict[str, object], *, anew: bool) -> None:
        """Everything before the first step."""
        problem = self._config.origin_problem() if anew else None
        if problem is not None:
            raise ApplicationError(problem, type="InvalidConfig", non_retryable=True)
        self._state.enter("starting" if anew else "resuming", "the run's folder")
        await self._take_folder(config)
        await (self._start() if anew else self._resume())

    async def _has_begun(self, beginning: "asyncio.Task[None]") -> bool:
        """Wait for the beginning; false if the run was stopped over it."""
        state = self._state
        try:
            await workflow.wait_condition(lambda: beginning.done() or state.stop)
        finally:
            stopped = not beginning.done()
            beginning.cancel()
            await workflow.wait([beginning])
        if stopped:
            self._recorder.give_up()
            state.note("stopped before it began to train")
            return False
        await beginning
        return True

    async def _take_folder(self, config: dict[str, object]) -> None:
        """However long it can't be written: what is waited for says why."""
        for attempts in itertools.count():
            try:
                created = await self._recorder.create_run(config)
            except ActivityError as error:
                final = isinstance(error.cause, ApplicationError) and error.cause.non_retryable
                if final or is_cancelled_exception(error):
                    raise
                self._state.waiting_for = f"the run's folder: {message_of(error)}"
                await workflow.sleep(backoff(attempts), summary="the run's folder")
            else:
                self._state.search_attributes = created.search_attributes
                return

    async def _start(self) -> None:
        state = self._state
        self._state.enter("preparing", "a rollout worker that loads the task")
        prepared = await self._prepare()
        self._note_all(prepared.notes)
        state.cursor.total = prepared.rows * self._config.epochs
        state.evaluation_rows = prepared.evaluation_rows
        await FirstLease(
            state, self._settings, self._trainer, self._producer, self._recovery
        ).acquire()
        self._producer.record_sample(force=True)
        self._producer.start()
        await self._evaluations.start_first(state.admission.version)

    async def _resume(self) -> None:
        """Go on after the run's end, or begin as a fork, from what the folder says."""
        state = self._state
        self._state.enter("resuming", "a rollout worker that loads the task")
        prepared = await self._prepare()
        state.evaluation_rows = prepared.evaluation_rows
        self._note_all(prepared.notes)
        await self._recovery.restore(LeaseLostError("the run was resumed", "Resumed"))
        await self._producer.settle_fatal()
        state.published_at = workflow.time()
        self._producer.record_sample(force=True)
        await self._evaluations.start_first(state.admission.version)

    def _note_all(self, notes: list[str]) -> None:
        for note in notes:
            self._state.note(note)

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
                text = "space in the store: the rows that the run trains on can't be kept"
                self._state.waiting_for = text
                await workflow.sleep(FULL_WAIT, summary=text)

    async def _train(self) -> None:
        state = self._state
        while (outcome := await self._take_step()) != "none":
            if outcome == "taken":
                await self._producer.settle_fatal()
                version = state.admission.version
                if self._evaluations.due(version):
                    await self._evaluations.start(version)
            if outcome == "open" or self._history_is_long() or self._is_outdated():
                await self._continue_as_new()

    async def _take_step(self) -> Outcome:
        """One step, through as many lost leases as it takes."""
        while True:
            try:
                return await self._step().run()
            except LeaseLostError as loss:
                if not await self._recovery.recover(loss):
                    return "none"

    def _step(self) -> OptimizerStep:
        return OptimizerStep(
            self._state,
            self._settings,
            self._trainer,
            self._producer,
            self._evaluations,
            self._recorder,
        )

    async def _finish(self, begun: bool) -> None:
        """Everything after the last step, from committed state."""
        self._end_steps(FINISHING)
        await self._end().finish(begun)
        self._state.enter("stopped" if self._state.stop else "completed")
        self._show()

    def _end(self) -> RunEnding:
        return RunEnding(
            self._state,
            self._settings,
            self._trainer,
            self._producer,
            self._evaluations,
            self._recorder,
            self._recovery,
        )

    def _end_steps(self, why: str) -> None:
        """No row is begun any more, and nobody need wait for a step's checkpoint."""
        self._ending = why
        self._producer.close()
        self._state.refuse_checkpoint(why)

    async def _unwind(self, error: BaseException) -> None:
        """Leave nothing that spends: also when the run was cancelled."""
        self._end_steps(UNWINDING)
        cancelled = is_cancelled_exception(error)
        self._state.enter("cancelling" if cancelled else "failing", "cleanup")
        ending: Ending = "cancelled" if cancelled else "failed"
        why = ending if cancelled else f"failed: {self._failure(error)}"
        cleanup = asyncio.create_task(self._end().clean_up(ending, why))
        while not cleanup.done() and not self._guard.was_reset:
            # A second cancellation must not interrupt the cleanup of the first.
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asyncio.shield(cleanup)
        if not cleanup.done():
            cleanup.cancel()
        elif not cleanup.cancelled() and cleanup.exception() is not None:
            workflow.logger.warning("cleanup failed: %s", cleanup.exception())
        self._state.waiting_for = ""

    def _failure(self, error: BaseException) -> BaseException:
        """The run's failure as Temporal shows it: what happened first, with its type."""
        if isinstance(error, LeaseLostError):
            failure = ApplicationError(str(error), type=error.kind, non_retryable=True)
        elif isinstance(error, ActivityError) and isinstance(error.cause, ApplicationError):
            cause = error.cause
            failure = ApplicationError(cause.message, type=cause.type, non_retryable=True)
        elif isinstance(error, FailureError) or is_cancelled_exception(error):
            return error
        else:
            # A fault of ours: raised as it is, it would fail the workflow task for ever.
            text = f"{type(error).__name__}: {error}"
            failure = ApplicationError(text, type="InternalError", non_retryable=True)
        return failure

    # Continue-as-new

    def _history_is_long(self) -> bool:
        info = workflow.info()
        long = info.get_current_history_length() > MAX_HISTORY
        return long or info.is_continue_as_new_suggested()

    def _is_outdated(self) -> bool:
        """Whether workers of another build are to take over."""
        return workflow.info().is_target_worker_deployment_version_changed()

    async def _continue_as_new(self) -> None:
        """Between two steps, or over a long one. Children run on, and report to whoever has the
        run's id."""
        state = self._state
        await workflow.wait_condition(
            lambda: (
                state.checkpoint_wanted
                or (
                    self._producer.settled
                    and self._recorder.idle
                    and not self._watchdog.looking
                    and workflow.all_handlers_finished()
                )
            )
        )
        if state.checkpoint_wanted:
            # Its handler waits for the next step, which begins with it.
            return
        versioned = workflow.info().get_current_deployment_version() is not None
        workflow.continue_as_new(
            args=[self._config.model_dump(mode="json"), self._state],
            # A run is pinned to the build that it began on; this is where it changes over.
            initial_versioning_behavior=ContinueAsNewVersioningBehavior.AUTO_UPGRADE
            if versioned
            else None,
        )

    # Messages

    @workflow.signal
    def group_finished(self, report: GroupReport) -> None:
        """From a PromptGroup: it has ended."""
        self._producer.on_group_finished(report)

    @workflow.signal
    def released(self, message: Released) -> None:
        """From a PromptGroup: some of its rollout calls have ended."""
        self._producer.on_released(message)

    @workflow.signal
    def lease_waiting(self, message: LeaseWaiting) -> None:
        """From the TrainerLease: what it waits for."""
        self._trainer.on_waiting(message)

    @workflow.signal
    def lease_granted(self, message: LeaseGranted) -> None:
        """From the TrainerLease: a session is open."""
        self._trainer.on_granted(message)

    @workflow.signal
    def lease_ended(self, message: LeaseEnded) -> None:
        """From the TrainerLease: the session is gone."""
        self._trainer.on_ended(message)

    @workflow.signal
    async def evaluation_finished(self, report: EvaluationReport) -> None:
        """From an Evaluation: its metrics, or why there are none."""
        await self._evaluations.on_finished(report)

    @workflow.signal(description='Stop gracefully; {"drain": true} awaits rollouts in flight.')
    async def stop(self, request: StopRequest | None = None) -> None:
        """Admit nothing new, finish a sealed step, save, evaluate, clean up."""
        if self._config_error is None:
            drain = request is not None and request.drain
            self._state.stop, self._state.drain = True, drain
            await self._recorder.control("stop, drained" if drain else "stop")

    @workflow.update(description="Admit nothing new; what is in flight is finished and trained.")
    async def pause(self) -> str:
        """Close admission until `resume`."""
        self._state.paused = True
        await self._recorder.control("pause")
        return "paused"

    @pause.validator
    def _check_pause(self) -> None:
        self._check_going_on()
        if self._state.paused:
            raise ValueError("the run is paused already")

    @workflow.update(description="Go on after a pause, or after a fatal error that was mended.")
    async def resume(self) -> str:
        """End a pause; clear the error that holds the run, and try what failed again."""
        self._producer.resume()
        await self._recorder.control("resume")
        return "resumed"

    @resume.validator
    def _check_resume(self) -> None:
        self._check_not_failing()
        if not self._state.paused and self._state.fatal is None:
            raise ValueError("the run is neither paused nor held")

    @workflow.update(description="Save a checkpoint of the last committed step; answers its path.")
    async def checkpoint(self) -> str:
        """Save now, or at the end of the step that is being trained."""
        state = self._state
        state.checkpoint_wanted = True
        await workflow.wait_condition(lambda: not state.checkpoint_wanted)
        error, path = state.checkpoint_error, state.checkpoints[-1].path
        if error is not None:
            await self._recorder.control(f"checkpoint: {error}")
            raise ApplicationError(error, type="NoCheckpoint")
        await self._recorder.control("checkpoint", checkpoint=path)
        return path

    @checkpoint.validator
    def _check_checkpoint(self) -> None:
        self._check_going_on()
        if not self._state.checkpoints:
            raise ValueError("the run hasn't saved its initial state yet")
        self._check_not_failing()
        if self._state.fatal is not None:
            raise ValueError(self._state.fatal.held)

    @workflow.update(description="Change the learning rate, O, C, intervals, ... of a running run.")
    async def reconfigure(self, changes: dict[str, Any]) -> str:
        """Apply changes from the next decision on; the run's folder remembers them."""
        names = ", ".join(sorted(changes))
        self._settings.config = reconfigured(self._config, changes)
        self._producer.reconfigured()
        await self._recorder.control(f"reconfigure {names}", changes=changes)
        return f"changed {names}"

    @reconfigure.validator
    def _check_reconfigure(self, changes: dict[str, Any]) -> None:
        self._check_going_on()
        reconfigured(self._config, changes)

    @workflow.update(description="Reject the row that failed, and go on.")
    async def skip_row(self) -> str:
        """Clear the error that holds the run; its row counts as rejected."""
        state = self._state
        group = self._producer.skip_row()
        await self._recorder.skip_group(group, state.admission.version)
        await self._recorder.control(f"skip_row {group.text}")
        return f"skipped row {group.text}"

    @skip_row.validator
    def _check_skip_row(self) -> None:
        self._check_not_failing()
        fatal = self._state.fatal
        if fatal is None:
            raise ValueError("the run isn't held: there is no row to skip")
        if fatal.group is None:
            raise ValueError(f"no row is the cause: {fatal.error}; mend it and resume, or stop")

    def _check_running(self) -> None:
        if self._config_error is not None:
            raise ValueError("the run's configuration is invalid")

    def _check_not_failing(self) -> None:
        self._check_running()
        fatal = self._state.fatal
        if fatal is not None and self._producer.fails:
            raise ValueError(f"the run fails: {fatal.error}")

    def _check_going_on(self) -> None:
        self._check_running()
        if self._ending is not None:
            raise ValueError(self._ending)

    @workflow.query(description="Where the run is.")
    def status(self) -> Status:
        if self._config_error is not None:
            raise ApplicationError(self._config_error, type="InvalidConfig")
        state, config = self._state, self._config
        admission = state.admission
        return Status(
            run=state.run.id,
            folder=state.run.folder,
            phase=state.phase,
            waiting_for=state.waiting_for,
            standstill=state.standstill(workflow.time()),
            step=state.step,
            total_steps=math.ceil(state.cursor.total / config.prompt_groups_per_step),
            version=admission.version,
            rows_total=state.cursor.total,
            rows_resolved=state.cursor.resolved_count,
            groups_in_flight=len(state.out),
            samples_in_flight=admission.in_flight,
            groups_ready=len(state.queue.batch),
            batch_size=state.queue.batch_size,
            staleness_capacity=admission.staleness_capacity,
            reward=state.reward,
            step_seconds=state.step_seconds,
            elapsed_seconds=workflow.time() - state.started_at,
            evaluations=state.evaluations,
            lease_epoch=state.epoch,
            recovered=state.recovered,
            checkpoint=state.checkpoint,
            saved=state.saves,
            model=state.model,
            error=state.fatal.error if state.fatal else None,
            origin=str(state.origin) if state.origin else None,
            notes=state.notes,
        )

    # What people see

    @property
    def _told(self) -> tuple[str, str, str, list[str]]:
        """What changes the page of the run: figures alone don't."""
        state = self._state
        standstill = state.standstill(workflow.time())
        return state.phase, state.waiting_for, standstill, state.notes

    async def _narrate(self) -> None:
        """Keep what the UI shows in step with where the run is."""
        while True:
            self._show()
            shown = self._told
            await workflow.wait_condition(lambda: self._told != shown)  # noqa: B023

    def _show(self) -> None:
        """Current details in the UI, and what runs can be filtered by."""
        state = self._state
        workflow.set_current_details(describe(self.status()))
        if state.search_attributes:
            attributes: list[SearchAttributeUpdate[Any]] = [
                RUN.value_set(state.run.id),
                STEP.value_set(state.step),
                POLICY_VERSION.value_set(state.admission.version),
            ]
            if state.reward is not None:
                attributes.append(REWARD.value_set(state.reward))
            shown = (state.step, state.reward)
            if shown != self._shown:
                self._shown = shown
                workflow.upsert_search_attributes(attributes)

    def _result(self) -> RunResult:
        state = self._state
        return RunResult(
            run=state.run.id,
            folder=state.run.folder,
            steps=state.step,
            version=state.admission.version,
            rows=state.cursor.resolved_count,
            stopped=state.stop,
            seconds=workflow.time() - state.started_at,
            checkpoint=state.checkpoint,
            model=state.model,
            evaluations=state.evaluations,
            recovered=state.recovered,
        )
