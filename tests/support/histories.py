"""The histories of a run: collected, measured against the budgets, and replayed."""

from collections.abc import Iterator

from temporalio.api.common.v1 import Payloads
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client, WorkflowHistory
from temporalio.plugin import SimplePlugin
from temporalio.worker import Replayer

from workers.processes import WORKFLOWS

MAX_PAYLOAD = 2048
"""Bytes of one activity or signal payload: names and numbers, never tokens."""
MAX_STATE = 64 * 1024
"""Bytes of a run's configuration, and of the state that continue-as-new carries."""


async def run_histories(client: Client, run_id: str, first: str) -> list[WorkflowHistory]:
    """Of all executions of a run, in order, and of all its children."""
    executions = [(run_id, first)]
    found = []
    for workflow_id, execution in executions:
        history = await client.get_workflow_handle(workflow_id, run_id=execution).fetch_history()
        found.append(history)
        for event in history.events:
            executions.extend(_followed_by(run_id, event))
    return found


def _followed_by(run_id: str, event: HistoryEvent) -> Iterator[tuple[str, str]]:
    if event.HasField("child_workflow_execution_started_event_attributes"):
        child = event.child_workflow_execution_started_event_attributes.workflow_execution
        yield child.workflow_id, child.run_id
    if event.HasField("workflow_execution_continued_as_new_event_attributes"):
        attributes = event.workflow_execution_continued_as_new_event_attributes
        yield run_id, attributes.new_execution_run_id


def check_payloads(history: WorkflowHistory) -> None:
    """Fail where something travels in history that belongs into the store."""
    for event in history.events:
        for what, payloads in _payloads(event):
            sizes = [len(payload.data) for payload in payloads.payloads]
            limit = MAX_STATE if what in STARTS else MAX_PAYLOAD
            assert all(size <= limit for size in sizes), (
                f"{history.workflow_id}, event {event.event_id}: {what} has {sizes} bytes, and "
                f"{limit} are allowed: {payloads.payloads[0].data[:400]!r}"
            )


STARTS = ("start", "continue-as-new", "create_run")
"""What carries a run's configuration or state."""


def _payloads(event: HistoryEvent) -> Iterator[tuple[str, Payloads]]:
    name = event.WhichOneof("attributes")
    assert name is not None
    attributes = getattr(event, name)
    match name.removesuffix("_event_attributes"):
        case "workflow_execution_started":
            yield "start", attributes.input
        case "workflow_execution_continued_as_new":
            yield "continue-as-new", attributes.input
        case "activity_task_scheduled":
            yield attributes.activity_type.name, attributes.input
        case "activity_task_completed":
            yield "activity result", attributes.result
        case "start_child_workflow_execution_initiated":
            yield attributes.workflow_type.name, attributes.input
        case "signal_external_workflow_execution_initiated" | "workflow_execution_signaled":
            yield attributes.signal_name, attributes.input


async def replay(histories: list[WorkflowHistory], plugins: list[SimplePlugin]) -> None:
    """Fail where the workflow code doesn't do again what it did."""
    replayer = Replayer(workflows=WORKFLOWS, plugins=plugins)
    for history in histories:
        await replayer.replay_workflow(history)
