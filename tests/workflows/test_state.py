"""A run's state, which continue-as-new passes to workers of another build."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from temporalio.client import WorkflowFailureError

from everburn.config import parse_config
from everburn.records.ids import RunRef
from support.farm import Farm, Start
from support.script import Script
from workflows.queues import ORCHESTRATOR_QUEUE
from workflows.run.state import NO_PROGRESS, STATE_SCHEMA, RunState

CONFIG = parse_config(
    {
        "rollout": "task:make_rollout_fn",
        "dataset": {"name": "task:rows"},
        "base_model": "accounts/everburn/models/tiny",
        "backend": "emulator",
        "lora_rank": 4,
    }
)
NEWER = STATE_SCHEMA + 1
STATE = RunState.initial(RunRef(store="runs", id="run"), CONFIG, now=5.0)


def test_a_state_is_read_as_it_was_carried() -> None:
    carried = STATE.model_dump(mode="json")
    assert carried["schema_version"] == STATE_SCHEMA
    assert RunState.model_validate(carried) == STATE


def test_a_stall_names_what_the_run_waits_for_now() -> None:
    state = STATE.model_copy()
    state.enter("step 1: collecting", "1 more prompt groups")
    state.progressed(1_000.0)
    late = 1_000.0 + NO_PROGRESS
    assert state.stall(late - 1) == ""
    since = "nothing has moved since 1970-01-01 00:16:40 UTC; waiting for "
    assert state.stall(late) == f"{since}1 more prompt groups"
    state.enter("held", "resume, skip_row or stop")
    assert state.stall(late + 3_600) == f"{since}resume, skip_row or stop"
    state.enter("completed")
    assert state.stall(late + 3_600) == ""
    state.enter("step 2: collecting", "1 more prompt groups")
    state.progressed(late + 3_600)
    assert state.stall(late + 3_601) == ""


def test_a_state_of_another_schema_is_refused_with_a_clear_error() -> None:
    with pytest.raises(
        ValidationError, match=rf"schema {NEWER}, and this worker reads {STATE_SCHEMA}\."
    ):
        RunState.model_validate(STATE.model_dump(mode="json") | {"schema_version": NEWER})


async def test_a_run_whose_state_cannot_be_read_ends_and_says_so(
    start: Start, farm: Farm, tmp_path: Path
) -> None:
    run = await start(Script(), rows=1)
    newer = STATE.model_dump(mode="json") | {"schema_version": NEWER}
    handle = await farm.client.start_workflow(
        "TrainRun",
        args=[farm.config(run.id, tmp_path), newer],
        id=f"{run.id}-newer",
        task_queue=ORCHESTRATOR_QUEUE,
    )
    with pytest.raises(WorkflowFailureError) as failure:
        await handle.result()
    assert f"the run's state has schema {NEWER}" in str(failure.value.cause)
    assert "everburn resume" in str(failure.value.cause)
    await run.result()
