"""Budgets: a run's events in history, and its state across continue-as-new."""

import json

import pytest

from support.farm import Farm, Start
from support.histories import MAX_STATE, run_histories
from support.script import Draw, Script
from workflows.run import train_run

GROUPS, GROUP, PER_STEP = 24, 8, 6
EVENTS_PER_STEP = 60
EVENTS_AROUND = 60
"""Events before the first row and after the last step."""


@pytest.mark.parametrize(("limit", "per_group"), [(None, 10), (32, 10 + GROUP)])
async def test_a_run_adds_few_events_per_group_and_step(
    start: Start, farm: Farm, limit: int | None, per_group: int
):
    run = await start(
        Script(),
        rows=GROUPS,
        completions_per_prompt=GROUP,
        prompt_groups_per_step=PER_STEP,
        max_head_offpolicy_versions=1,
        max_concurrency_rollout_sample=limit,
    )
    await run.result()
    assert run.handle.first_execution_run_id is not None
    own, *_ = await run_histories(farm.client, run.id, run.handle.first_execution_run_id)
    steps = GROUPS // PER_STEP
    allowed = GROUPS * per_group + steps * EVENTS_PER_STEP + EVENTS_AROUND
    assert len(own.events) <= allowed


async def test_the_state_across_continue_as_new_stays_small(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    """A wide window, whose rows end out of order and leave gaps behind the cursor."""
    monkeypatch.setattr(train_run, "MAX_HISTORY", 1)

    async def play(draw: Draw) -> float | None:
        return None if draw.row % 3 == 1 else draw.completion

    run = await start_tuned(
        Script(play), rows=30, prompt_groups_per_step=5, max_head_offpolicy_versions=3
    )
    result = await run.result()
    assert (result.rows, result.steps) == (30, 4)
    assert run.handle.first_execution_run_id is not None
    histories = await run_histories(tunable_farm.client, run.id, run.handle.first_execution_run_id)
    carried = [
        payload.data
        for history in histories
        for event in history.events
        for payload in event.workflow_execution_continued_as_new_event_attributes.input.payloads
    ]
    states = [json.loads(data) for data in carried if b"schema_version" in data]
    assert [state["step"]["committed"] for state in states] == [1, 2, 3, 4]
    assert max(map(len, carried)) <= MAX_STATE // 10
