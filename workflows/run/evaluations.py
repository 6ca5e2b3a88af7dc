"""When evaluations run: at the first step, at intervals, at the end, never twice at a step.

Starts Evaluation children and waits for them where their snapshot is about to be replaced.
Doesn't own how an evaluation runs (workflows/children/evaluation.py).
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.workflow import ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from everburn.records.ids import incarnation_suffix
    from workflows.children.evaluation import Evaluation
    from workflows.messages import ROLLOUT_FAILED, EvaluationOrder, EvaluationReport, RolloutsFailed
    from workflows.run.live_config import LiveConfig
    from workflows.run.recorder import Recorder
    from workflows.run.state import Fatal, RunState

GRACE = timedelta(minutes=5)
"""Added to an evaluation's own deadline: without a report by then, none will come."""


class Evaluations:
    def __init__(self, state: RunState, live: LiveConfig, recorder: Recorder) -> None:
        self._run = state
        self._state = state.evaluation
        self._live = live
        self._recorder = recorder
        self._unstarted: int | None = None
        """The version whose evaluation the server hasn't started yet."""
        self._reported: int | None = None
        """The version whose report this execution has received."""

    def due(self, version: int) -> bool:
        """Whether a version is evaluated at its publication."""
        return version % self._live.config.evaluation_interval == 0

    def wanted(self, version: int) -> bool:
        """Whether the run evaluates, and the version wasn't evaluated yet."""
        return self._live.config.evaluates and self._state.last != version

    @property
    def workflow_id(self) -> str | None:
        """Of the running evaluation."""
        version = self._state.running
        return None if version is None else self._workflow_id(version)

    @property
    def awaited_id(self) -> str | None:
        """Of the evaluation that hasn't reported: a check must find it running."""
        version = self._state.running
        return None if version in (self._unstarted, self._reported) else self.workflow_id

    def _workflow_id(self, version: int) -> str:
        return f"{self._run.run.id}/eval-{version}{incarnation_suffix(self._run.incarnation)}"

    async def start_first(self, version: int) -> None:
        """Evaluate the policy that the run begins with, if `initial_evaluation` is set."""
        if self._live.config.initial_evaluation:
            await self.start(version)

    async def start(self, version: int) -> None:
        """Evaluate the version that is served now, unless it was evaluated."""
        state = self._state
        if not self.wanted(version):
            return
        state.running = state.last = self._unstarted = version
        order = EvaluationOrder(
            run=self._run.run,
            version=version,
            rows=self._run.evaluation_rows,
            timeout=self._live.config.evaluation_timeout,
            search_attributes=self._run.search_attributes,
            count_failures=self._live.config.on_any_rollout_failure == "fail",
            incarnation=self._run.incarnation,
        )
        try:
            await workflow.start_child_workflow(
                Evaluation.run,
                order,
                id=self._workflow_id(version),
                parent_close_policy=ParentClosePolicy.ABANDON,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                static_summary=f"evaluation of policy v{version}",
            )
        except WorkflowAlreadyStartedError:
            workflow.logger.info("version %s had its evaluation already", version)
            state.running = None
        finally:
            self._unstarted = None

    async def on_finished(self, report: EvaluationReport) -> None:
        """Handle a report. Repeated and late reports, and those of an earlier incarnation, change
        nothing."""
        state = self._state
        known = report.version != state.running or report.version == self._reported
        if known or report.incarnation != self._run.incarnation:
            return
        self._reported = report.version
        if report.error is not None:
            self._on_failed(report.version, report.error, report.failed)
        if report.metrics:
            await self._recorder.record_evaluation(report.version, report.metrics)
        first = min(state.metrics, default=report.version)
        kept = {version: m for version, m in state.metrics.items() if version == first}
        state.metrics = kept | {report.version: report.metrics}
        if state.running == report.version:  # else it was given up, and another one may run
            state.running = None

    def _on_failed(self, version: int, error: str, failed: int) -> None:
        """Training continues without the metrics, unless any failed rollout ends the run."""
        self._run.note(f"evaluation of version {version}: {error}")
        if self._live.config.on_any_rollout_failure == "fail":
            self._run.fail(
                Fatal(
                    error=f"the evaluation of version {version} failed, and on_any_rollout_failure "
                    f"is 'fail': {error}",
                    error_type=ROLLOUT_FAILED,
                    rollouts=RolloutsFailed(
                        version=version, evaluation=True, failed=failed, first=error
                    ),
                )
            )

    async def cancel(self) -> None:
        """Cancel the running evaluation: what it uses is about to be released."""
        if self.workflow_id is None:
            return
        with contextlib.suppress(ApplicationError):
            await workflow.get_external_workflow_handle(self.workflow_id).cancel()

    async def finish(self, interrupted: Callable[[], bool]) -> None:
        """Wait for the running evaluation, whose snapshot is about to be replaced, or for an
        interruption: an evaluation whose snapshot is gone waits for a recovery."""
        state = self._state
        if state.running is None:
            return
        limit = timedelta(seconds=self._live.config.evaluation_timeout) + GRACE
        try:
            await workflow.wait_condition(
                lambda: state.running is None or interrupted(), timeout=limit
            )
        except TimeoutError:
            self._run.note(f"evaluation of version {state.running} never reported")
            state.running = None
