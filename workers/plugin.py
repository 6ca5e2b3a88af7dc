"""The Temporal plugin of Everburn's clients, workers and replayers.

Owns the data converter, the modules that pass through the sandbox (each with its reason), the
exceptions that fail a workflow, and the interceptors. Doesn't own which workflows and activities a
process serves (workers/processes.py).
"""

import dataclasses

from pydantic import ValidationError
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.plugin import SimplePlugin
from temporalio.worker import WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from activities.errors import ErrorInterceptor
from activities.failure_types import RedactingFailureConverter
from activities.heartbeats import HeartbeatInterceptor

PASSED_THROUGH = (
    # Everburn's own modules are pure, without global state that a replay could see; shared, so that
    # a workflow task doesn't import them again.
    "everburn",
    "activities",
    # pydantic's compiled core can't be imported twice in one process.
    "pydantic",
    "pydantic_core",
    # Imported by the above on first use, never inside a workflow.
    "annotated_types",
    "typing_inspection",
    # hud's dependencies install its import hook, which imports it within every other import: half a
    # second for each workflow task's sandbox.
    "beartype",
)


def _runner(runner: WorkflowRunner | None) -> WorkflowRunner:
    if not isinstance(runner, SandboxedWorkflowRunner):
        raise ValueError("Everburn's workflows run in the sandbox")
    restrictions = runner.restrictions.with_passthrough_modules(*PASSED_THROUGH)
    return dataclasses.replace(runner, restrictions=restrictions)


def everburn_plugin() -> SimplePlugin:
    """For Client.connect(plugins=[...]), whose workers inherit it, and for Replayer."""
    return SimplePlugin(
        "everburn",
        data_converter=dataclasses.replace(
            pydantic_data_converter, failure_converter_class=RedactingFailureConverter
        ),
        interceptors=[HeartbeatInterceptor(), ErrorInterceptor()],
        workflow_runner=_runner,
        # A message that doesn't fit its model must fail the run, not be retried forever.
        workflow_failure_exception_types=[ValidationError],
    )
