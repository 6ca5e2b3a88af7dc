"""The current code replays recorded histories of earlier code: workers can be upgraded while runs
are open. `make histories` records them again."""

import base64
import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowHistory

from support.histories import replay
from workers.plugin import everburn_plugin

FILES = sorted((Path(__file__).parents[1] / "histories").glob("*.json.gz"))


def text_of(file: Path) -> str:
    return gzip.decompress(file.read_bytes()).decode()


def events(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text_of(file))["events"]
    return found


def started(file: Path) -> dict[str, Any]:
    attributes: dict[str, Any] = events(file)[0]["workflowExecutionStartedEventAttributes"]
    return attributes


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(".json.gz"))
async def test_a_recorded_history_is_replayed(file: Path) -> None:
    history = WorkflowHistory.from_json(started(file)["workflowId"], text_of(file))
    await replay([history], [everburn_plugin()])


def test_every_kind_of_workflow_is_recorded() -> None:
    kinds = Counter(started(file)["workflowType"]["name"] for file in FILES)
    assert kinds.keys() == {"TrainRun", "PromptGroup", "TrainerLease", "Evaluation"}
    continued = [file for file in FILES if "continuedExecutionRunId" in started(file)]
    assert continued, "a run that continues after continue-as-new"
    activities = {
        event["activityTaskScheduledEventAttributes"]["activityType"]["name"]
        for file in FILES
        for event in events(file)
        if "activityTaskScheduledEventAttributes" in event
    }
    assert {"load_checkpoint", "replay_step", "evaluate_shard", "skip_group"} <= activities
    assert {"carry_publication", "record_command"} <= activities
    assert {"advance_provisioning", "clean_up_provisioning"} <= activities, "a dedicated lease"


@pytest.mark.parametrize("scenario", ["resumed", "forked"])
def test_runs_that_begin_from_a_folder_are_recorded(scenario: str) -> None:
    (file,) = (file for file in FILES if file.name == f"{scenario}.run-1.json.gz")
    state = started(file)["input"]["payloads"][1]["data"]
    values = json.loads(base64.b64decode(state))
    assert (values["lease"]["grant"], values["incarnation"]) == (None, 1)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(".json.gz"))
def test_a_recorded_history_names_no_machine(file: Path) -> None:
    text = text_of(file)
    decoded = [base64.b64decode(data).decode() for data in re.findall(r'"data": "(.*?)"', text)]
    for part in (text, *decoded):
        assert not re.search(r"/(tmp|home|root|work|Users|var)/", part)
        assert set(re.findall(r"\d+@([\w.]+)", part)) <= {"worker"}
