"""A terminated run cancels nothing; what it has started finds that out, and ends."""

import asyncio
from functools import partial
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowHandle

from activities import run_watch, trainer
from everburn.run_folder import OWNER_KEY
from support.farm import Farm, Start
from support.script import Draw, Script
from support.waiting import Gate, until
from workers.temporal_server import find_binary


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_watch, "INTERVAL", 0.2)
    monkeypatch.setattr(trainer, "PROBE_INTERVAL", 0.2)


async def never(draw: Draw) -> float:
    await Gate().passed()
    return 0.0


async def test_nothing_that_a_terminated_run_has_started_goes_on(start: Start, farm: Farm):
    async def evaluate(step: int, rollout_fn: Any) -> dict[str, float]:
        await rollout_fn({}, cursor_index=0, rollout_idx=0)
        return {}

    run = await start(Script(never, evaluate=evaluate), rows=2, max_head_offpolicy_versions=1)
    await until(lambda: len(run.script.begun) == 5)
    terminate = await asyncio.create_subprocess_exec(
        find_binary(),
        *("workflow", "terminate", "--workflow-id", run.id),
        *("--address", farm.client.service_client.config.target_host),
    )
    assert await terminate.wait() == 0

    await until(lambda: len(run.script.cancelled) == 5)
    await run.trainer.reached("close")
    for name in ("row-0.0", "row-1.0", "lease-1", "eval-0"):
        child = farm.client.get_workflow_handle(f"{run.id}/{name}")
        await until(partial(is_closed, child), partial(str, name))
    assert len(run.script.begun) == 5, "nothing is begun again"


async def test_a_session_of_a_former_life_is_given_back(start: Start):
    """The run was terminated and resumed before its holder looked: it is open, and not the one."""
    run = await start(Script(never), rows=1)
    await until(lambda: len(run.script.begun) == 2)
    owner = run.store.get_json(OWNER_KEY)
    run.store.put_json(OWNER_KEY, owner | {"chain": "another", "life": 1})
    await run.trainer.reached("close")


async def is_closed(workflow: WorkflowHandle[Any, Any]) -> bool:
    return (await workflow.describe()).status != WorkflowExecutionStatus.RUNNING
