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
    from workflows.children.evaluation import Evaluation
    from workflows.messages import ROLLOUT_FAILED, EvaluationOrder, EvaluationReport, RolloutsFailed
    from workflows.run.live_config import Settings
    from workflows.run.recorder import Recorder
    from workflows.run.state import Fatal, RunState

GRACE = timedelta(minutes=5)
"""Beyond its own deadline: an evaluation that hasn't reported by then never will."""


class Evaluations:
    def __init__(self, state: RunState, settings: Settings, recorder: Recorder) -> None:
        self._state = state
        self._settings = settings
        self._recorder = recorder
        self._unborn: int | None = None
        """The version whose evaluation the server hasn't started yet."""
        self._reported: int | None = None
        """The version whose report has come, in this execution."""

    def due(self, version: int) -> bool:
        """Whether a version is evaluated when it is published."""
        return version % self._settings.config.evaluation_interval == 0

    def wanted(self, version: int) -> bool:
        """Whether a version can have an evaluation and hasn't had one."""
        return self._settings.config.evaluates and self._state.evaluated != version

    @property
    def workflow_id(self) -> str | None:
        """Of the evaluation that runs."""
        version = self._state.evaluating
        return None if version is None else self._workflow_id(version)

    @property
    def awaited_id(self) -> str | None:
        """Of the evaluation that has still to report: looked for, it must be found running."""
        version = self._state.evaluating
        return None if version in (self._unborn, self._reported) else self.workflow_id

    def _workflow_id(self, version: int) -> str:
        life = f".{self._state.life}" if self._state.life else ""
        return f"{self._state.run.id}/eval-{version}{life}"

    async def start_first(self, version: int) -> None:
        """Evaluate the policy that the run begins with, where that is wanted."""
        if self._settings.config.initial_evaluation:
            await self.start(version)

    async def start(self, version: int) -> None:
        """Start the evaluation of the version that is served now, unless it has had one."""
        state = self._state
        if not self.wanted(version):
            return
        state.evaluating = state.evaluated = self._unborn = version
        order = EvaluationOrder(
            run=state.run,
            version=version,
            rows=state.evaluation_rows,
            timeout=self._settings.config.evaluation_timeout,
            search_attributes=state.search_attributes,
            count_failures=self._settings.config.on_any_rollout_failure == "fail",
            life=state.life,
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
            state.evaluating = None
        finally:
            self._unborn = None

    async def on_finished(self, report: EvaluationReport) -> None:
        """Take in a report; repeated and late ones change nothing, nor those of a former life."""
        state = self._state
        known = report.version != state.evaluating or report.version == self._reported
        if known or report.life not in (None, state.life):
            return
        self._reported = report.version
        if report.error is not None:
            self._on_failed(report.version, report.error, report.failed)
        if report.metrics:
            await self._recorder.record_evaluation(report.version, report.metrics)
        first = min(state.evaluations, default=report.version)
        kept = {version: m for version, m in state.evaluations.items() if version == first}
        state.evaluations = kept | {report.version: report.metrics}
        if state.evaluating == report.version:  # else it was given up, and another may run
            state.evaluating = None

    def _on_failed(self, version: int, error: str, failed: int) -> None:
        """Training goes on without the figures, unless any failed rollout is to end the run."""
        self._state.note(f"evaluation of version {version}: {error}")
        if self._settings.config.on_any_rollout_failure == "fail" and self._state.fatal is None:
            self._state.fatal = Fatal(
                error=f"the evaluation of version {version} failed, and on_any_rollout_failure is "
                f"'fail': {error}",
                error_type=ROLLOUT_FAILED,
                rollouts=RolloutsFailed(
                    version=version, evaluation=True, failed=failed, first=error
                ),
            )

    async def cancel(self) -> None:
        """Ask the evaluation that runs to end: what it uses is about to be given back."""
        if self.workflow_id is None:
            return
        with contextlib.suppress(ApplicationError):
            await workflow.get_external_workflow_handle(self.workflow_id).cancel()

    async def finish(self, interrupted: Callable[[], bool]) -> None:
        """Wait for the evaluation that runs, or for an interruption.

        Its snapshot is about to be replaced; and an evaluation whose snapshot died waits in turn
        for the recovery that `interrupted` tells of.
        """
        state = self._state
        if state.evaluating is None:
            return
        limit = timedelta(seconds=self._settings.config.evaluation_timeout) + GRACE
        try:
            await workflow.wait_condition(
                lambda: state.evaluating is None or interrupted(), timeout=limit
            )
        except TimeoutError:
            state.note(f"evaluation of version {state.evaluating} never reported")
            state.evaluating = None
