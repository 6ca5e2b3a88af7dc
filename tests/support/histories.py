"""Collects and replays the histories of runs (tests/system/histories.py), and checks their
budgets."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from temporalio.api.common.v1 import Payloads
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import WorkflowHistory

from support.temporal import running_temporal
from system.histories import replay, run_histories
from workers.connection import connect
from workers.plugin import everburn_plugin
from workers.stack.folder import StackFolder

MAX_PAYLOAD = 64 * 1024
"""Maximum bytes of one activity or signal payload: names and numbers, never tokens."""
USUAL_PAYLOAD = 2 * 1024
"""Maximum bytes of most payloads."""
MAX_STATE = 256 * 1024
"""Maximum bytes of a run's configuration, and of the state that continue-as-new carries."""


def check_payloads(history: WorkflowHistory) -> None:
    """Fail if a payload exceeds its budget: large data belongs in the store."""
    usual = []
    for event in history.events:
        for what, payloads in _payloads(event):
            sizes = [len(payload.data) for payload in payloads.payloads]
            limit = MAX_STATE if what in STARTS else MAX_PAYLOAD
            assert all(size <= limit for size in sizes), (
                f"{history.workflow_id}, event {event.event_id}: {what} has {sizes} bytes, and "
                f"{limit} are allowed: {payloads.payloads[0].data[:400]!r}"
            )
            usual += sizes if what not in STARTS else []
    assert not usual or median(usual) <= USUAL_PAYLOAD, f"{history.workflow_id}: {sorted(usual)}"


__all__ = ["check_payloads", "replay", "replay_stack", "run_histories"]
STARTS = ("start", "continue-as-new", "create_run")
"""Payloads with a run's configuration or state."""


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


def replay_stack(folder: Path) -> None:
    """Replay and check all histories of a folder's local stack, which must be down."""
    database = StackFolder(folder).database
    if database.exists() and any(folder.glob("runs/*/owner.json")):
        with running_temporal(database.parent) as address:
            asyncio.run(_replay_server(address))


async def _replay_server(address: str) -> None:
    client = await connect(address, "default")
    histories = [
        await client.get_workflow_handle(found.id, run_id=found.run_id).fetch_history()
        async for found in client.list_workflows()
    ]
    await replay(histories, [everburn_plugin()])
