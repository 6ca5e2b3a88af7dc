"""The histories of a run, and their replay. Doesn't own the budgets of histories
(tests/support/histories.py).
"""

from collections.abc import AsyncIterator, Iterator

from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client, WorkflowHistory
from temporalio.plugin import SimplePlugin
from temporalio.worker import Replayer

from workers.processes import WORKFLOWS


async def first_execution(client: Client, run_id: str) -> str:
    """The Temporal run id of the first execution of a run's current incarnation."""
    description = await client.get_workflow_handle(run_id).describe()
    return description.raw_description.workflow_execution_info.first_run_id


async def run_histories(client: Client, run_id: str, first: str) -> list[WorkflowHistory]:
    """The histories of all executions of a run, in order, and of all its children."""
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


async def replay(histories: list[WorkflowHistory], plugins: list[SimplePlugin]) -> None:
    """Replay histories. Raises NondeterminismError if the workflow code doesn't match one."""

    async def each() -> AsyncIterator[WorkflowHistory]:
        for history in histories:
            yield history

    # One worker for all: starting one takes longer than replaying a short history.
    replayer = Replayer(workflows=WORKFLOWS, plugins=plugins)
    await replayer.replay_workflows(each(), raise_on_replay_failure=True)
