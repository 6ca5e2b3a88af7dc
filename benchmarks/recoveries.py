"""Recovery time of a run after each process death, from its histories and its executions.

Owns the definition of recovery for each kind of process. Doesn't own the kills
(tests/system/processes.py).
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client

from system.histories import first_execution
from system.processes import Death
from system.tiny_task import Execution, read_executions


@dataclass(frozen=True)
class Recovery:
    """The recovery from one death. seconds: until the interrupted work continued, without
    `redone_s`, the time of replayed steps.

    For a rollout worker: until all completions that it was executing are executed again. For an
    orchestrator: until the run's next workflow task completes. For a trainer worker and the
    training service: until the run's policy is published again; null if no lease failed.
    """

    kind: str
    at: float
    """Seconds since 1970."""
    seconds: float | None
    redone_s: float = 0.0


@dataclass(frozen=True)
class Event:
    """at: seconds since 1970. name: the event's kind, with an activity's type."""

    at: float
    name: str
    summary: str


async def recoveries(
    client: Client, run_id: str, deaths: Sequence[Death], executions: Path
) -> list[Recovery]:
    """The recovery from each death, in order."""
    events = [event async for event in _events(client, run_id)]
    found = []
    for death in deaths:
        match death.name:
            case "rollout":
                found.append(of_rollout_worker(death, list(read_executions(executions))))
            case "orchestrator":
                found.append(_of_orchestrator(death, events))
            case "trainer" | "emulator":
                found.append(of_trainer(death, events))
    return found


def of_rollout_worker(death: Death, calls: list[Execution]) -> Recovery:
    """Until all completions that it was executing, except dropped ones, are executed again."""
    before = [call for call in calls if call.at <= death.at]
    returned = {call.place for call in before if call.event == "returned"}
    interrupted = {call.place for call in before if call.event == "begun"} - returned
    again: dict[tuple[int, int], float] = {}
    for call in calls:
        if call.place in interrupted and call.at > death.at:
            again[call.place] = min(call.at, again.get(call.place, call.at))
    last = max(again.values(), default=death.at)
    return Recovery("rollout", death.at, round(last - death.at, 2))


def _of_orchestrator(death: Death, events: list[Event]) -> Recovery:
    done = _first(events, death.at, "workflow_task_completed")
    return Recovery("orchestrator", death.at, None if done is None else round(done - death.at, 2))


def of_trainer(death: Death, events: list[Event]) -> Recovery:
    """Until the run's policy is published again. Older versions that rollouts use are published
    before it; their summaries identify them (workflows/run/recovery.py)."""
    lost = _first(events, death.at, "scheduled load_checkpoint")
    again = [
        event.at
        for event in events
        if lost is not None
        and event.at > lost
        and event.name == "completed publish"
        and event.summary.endswith("again")
    ]
    if not again:
        return Recovery(death.name, death.at, None)
    replays = [e for e in events if death.at < e.at < again[0] and "replay_step" in e.name]
    starts = [event.at for event in replays if event.name.startswith("started")]
    ends = [event.at for event in replays if event.name.startswith("completed")]
    redone = sum(ends) - sum(starts)
    seconds = again[0] - death.at - redone
    return Recovery(death.name, death.at, round(seconds, 2), round(redone, 2))


def _first(events: list[Event], after: float, name: str) -> float | None:
    return next((event.at for event in events if event.at > after and event.name == name), None)


async def _events(client: Client, run_id: str) -> AsyncIterator[Event]:
    """The events of all executions of the run, in order."""
    execution: str | None = await first_execution(client, run_id)
    while execution is not None:
        history = await client.get_workflow_handle(run_id, run_id=execution).fetch_history()
        execution = None
        scheduled: dict[int, tuple[str, str]] = {}
        for event in history.events:
            kind = str(event.WhichOneof("attributes")).removesuffix("_event_attributes")
            if kind == "workflow_execution_continued_as_new":
                attributes = event.workflow_execution_continued_as_new_event_attributes
                execution = attributes.new_execution_run_id
            yield _named(event, kind, scheduled)


def _named(event: HistoryEvent, kind: str, scheduled: dict[int, tuple[str, str]]) -> Event:
    at = event.event_time.ToNanoseconds() / 1e9
    if not kind.startswith("activity_task_") or kind.endswith("cancel_requested"):
        return Event(at, kind, "")
    attributes = getattr(event, f"{kind}_event_attributes")
    what = kind.removeprefix("activity_task_")
    if what == "scheduled":
        summary = event.user_metadata.summary.data.decode().strip('"')
        scheduled[event.event_id] = attributes.activity_type.name, summary
        return Event(at, f"scheduled {attributes.activity_type.name}", summary)
    name, summary = scheduled[attributes.scheduled_event_id]
    return Event(at, f"{what} {name}", summary)
