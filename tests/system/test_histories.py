"""Replay detects a history that doesn't match the code, at any place among matching ones."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowHistory
from temporalio.workflow import NondeterminismError

from system.histories import replay
from workers.plugin import everburn_plugin

RECORDED = Path(__file__).parents[1] / "histories"
ROWS = ["eventful.row-0.0", "eventful.row-1.0", "eventful.row-1.1", "eventful.row-2.0"]


def recorded(name: str, **renamed: str) -> WorkflowHistory:
    """A recorded history. renamed: activity types to replace in it."""
    text = gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes()).decode()
    history: dict[str, Any] = json.loads(text)
    for event in history["events"]:
        if scheduled := event.get("activityTaskScheduledEventAttributes"):
            kind = scheduled["activityType"]
            kind["name"] = renamed.get(kind["name"], kind["name"])
    started = history["events"][0]["workflowExecutionStartedEventAttributes"]
    return WorkflowHistory.from_json(started["workflowId"], history)


async def test_histories_as_they_were_are_replayed() -> None:
    await replay([recorded(name) for name in ROWS], [everburn_plugin()])


@pytest.mark.parametrize("place", range(len(ROWS)))
async def test_a_history_of_something_else_is_found_among_others(place: int) -> None:
    histories = [recorded(name) for name in ROWS]
    histories[place] = recorded(ROWS[place], complete_group="complete_another")
    with pytest.raises(NondeterminismError, match="complete_another"):
        await replay(histories, [everburn_plugin()])
