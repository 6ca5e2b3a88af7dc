"""Bad input: each mistake fails the run at once, with an error that says what to do."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError, WorkflowQueryFailedError
from temporalio.exceptions import ApplicationError

from support.farm import Farm, Start
from support.script import Script, scripts
from support.waiting import PATIENCE
from workflows.queues import ORCHESTRATOR_QUEUE
from workflows.run.train_run import TrainRun


async def failure_of(farm: Farm, run_id: str, *args: Any) -> ApplicationError:
    """The failure of a run that is started like the Temporal CLI starts it."""
    with pytest.raises(WorkflowFailureError) as failure:
        await asyncio.wait_for(
            farm.client.execute_workflow(
                "TrainRun", args=args, id=run_id, task_queue=ORCHESTRATOR_QUEUE
            ),
            PATIENCE,
        )
    assert isinstance(failure.value.cause, ApplicationError)
    return failure.value.cause


async def test_all_problems_of_a_configuration_are_in_one_message(farm: Farm, tmp_path: Path):
    config = {
        "rollout": "no colon",
        "dataset": "rows.jsonl",
        "base_model": "m",
        "completions_per_prompt": 1,
        "temperture": 1.0,
        "store": str(tmp_path),
    }
    failure = await failure_of(farm, "bad-config", config)
    assert failure.type == "InvalidConfig"
    for text in (
        "rollout: 'no colon' doesn't name a callable",
        "completions_per_prompt",
        "temperture: no such field; did you",
    ):
        assert text in failure.message
    assert is_empty(tmp_path)
    with pytest.raises(WorkflowQueryFailedError, match="no such field"):
        await farm.client.get_workflow_handle("bad-config").query("status")


@pytest.mark.parametrize("args", [(), (None,), ("run.json",), ([],), (3,)], ids=repr)
async def test_arguments_that_are_no_configuration_fail_the_run(farm: Farm, args: tuple[Any, ...]):
    failure = await failure_of(farm, f"bad-args-{args}", *args)
    assert failure.type == "InvalidConfig"
    assert "a run's configuration is a JSON object, not" in failure.message


async def test_an_invalid_state_fails_the_run(farm: Farm, tmp_path: Path):
    scripts["bad-state"] = Script()
    config = farm.config("bad-state", tmp_path)
    failure = await failure_of(farm, "bad-state", config, {"step": "three"})
    assert failure.type == "ValidationError"
    assert "RunState" in failure.message


def is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())


def make_sync(setup: Any) -> Any:
    return lambda sample_prompt: None


def make_error(setup: Any) -> Any:
    raise OSError("the tool server isn't there")


@pytest.mark.parametrize(
    ("rollout", "kind", "text"),
    [
        ("no_such_module:make", "EntrypointError", "can't import 'no_such_module'"),
        ("support.tasks:no_such", "EntrypointError", "module 'support.tasks' has no 'no_such'"),
        ("support.tasks:__doc__", "EntrypointError", "is a str, not callable"),
        ("{here}:make_sync", "InvalidRolloutError", "it must return an async function"),
        ("{here}:make_error", "OSError", "the tool server isn't there"),
    ],
)
async def test_a_rollout_function_that_cannot_be_made_fails_the_run_at_once(
    start: Start, rollout: str, kind: str, text: str
):
    run = await start(Script(), rollout=rollout.replace("{here}", __name__))
    failure = await run.failure()
    assert failure.type == kind
    assert text in failure.message
    if kind == "EntrypointError" and "callable" not in text:
        assert "worker " in failure.message
    assert run.trainer.calls == []


async def test_bad_rows_are_named_by_their_line(start: Start, tmp_path: Path):
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text('{"a": 1}\n[1, 2]\n')
    run = await start(Script(), dataset=str(dataset))
    failure = await run.failure()
    assert failure.type == "DatasetError"
    assert failure.message == f"{dataset}:2: a row is a JSON object, not list"


async def test_a_dataset_without_rows_fails_the_run(start: Start):
    run = await start(Script(), rows=0)
    failure = await run.failure()
    assert (failure.type, run.trainer.calls) == ("DatasetError", [])
    assert "has no rows" in failure.message


async def test_a_folder_of_another_run_is_left_alone(start: Start, farm: Farm, tmp_path: Path):
    run = await start(Script(), rows=1)
    await run.result()
    ledger = run.ledger
    config = farm.config(run.id, tmp_path, rows=1)
    failure = await failure_of(farm, run.id, config)
    assert failure.type == "RunFolderTakenError"
    assert run.ledger == ledger


async def test_a_run_id_whose_folder_was_deleted_can_be_used_again(
    start: Start, farm: Farm, tmp_path: Path
):
    """The workers have executed the failed run with this id and keep no state of it."""
    run = await start(Script(), rows=1, rollout=f"{__name__}:make_error")
    assert (await run.failure()).type == "OSError"
    shutil.rmtree(run.store.folder)
    config = farm.config(run.id, tmp_path, rows=2, loss="cispo")
    await asyncio.wait_for(
        farm.client.execute_workflow(
            TrainRun.run, args=[config], id=run.id, task_queue=ORCHESTRATOR_QUEUE
        ),
        PATIENCE,
    )
    assert (run.trained, {entry.loss for entry in run.ledger}) == (["0", "1"], {"cispo"})


async def test_a_stop_that_cannot_be_read_changes_nothing(start: Start):
    run = await start(Script(), rows=1)
    await run.handle.signal("stop", {"drian": True})
    result = await run.result()
    assert result.stopped is False
