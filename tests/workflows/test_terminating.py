"""A terminated run cancels nothing: its children and activities notice it and end, also if the run
is resumed before their next check."""

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowHandle

from activities import liveness, trainer
from activities.messages import RunIncarnation
from activities.reconciliation import ReconciliationActivities
from everburn.records.run_folder import OWNER_KEY
from everburn.records.verification import check_records
from support.farm import Farm, Start
from support.script import Draw, Script
from support.waiting import PATIENCE, Gate, until
from workers.stack.temporal_server import find_binary


@pytest.fixture(autouse=True)
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "INTERVAL", 0.2)
    monkeypatch.setattr(trainer, "PROBE_INTERVAL", 0.2)


async def never(draw: Draw) -> float:
    await Gate().passed()
    return 0.0


async def test_everything_that_a_terminated_run_has_started_ends(start: Start, farm: Farm):
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


async def test_a_session_of_a_former_incarnation_is_closed(start: Start):
    """The run was terminated and resumed before its holder's check: it is open, but as a newer
    incarnation."""
    run = await start(Script(never), rows=1)
    await until(lambda: len(run.script.begun) == 2)
    owner = run.store.get_json(OWNER_KEY)
    run.store.put_json(OWNER_KEY, owner | {"first_execution_id": "another", "incarnation": 1})
    await run.trainer.reached("close")


async def test_a_session_that_opens_for_a_former_incarnation_is_closed(start: Start):
    """It opens after the run was resumed; and a later request opens no session."""
    script = Script(never)
    opening = script.trainer.hold("open")
    run = await start(script, rows=1)
    await run.trainer.reached("open")
    run.store.put_json(OWNER_KEY, run.store.get_json(OWNER_KEY) | {"incarnation": 1})
    opening.open()
    await run.trainer.reached("close")
    assert (await run.failure()).message == f"run {run.id} has no use for lease 2 any more"
    assert run.trainer.count("open") == 1


async def test_work_of_a_former_incarnation_ends_while_the_run_continues(
    start: Start, farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    """Rollouts and an evaluation end, and report nothing to the incarnation that continues."""
    gate = Gate()
    evaluations: list[int] = []

    async def play(draw: Draw) -> float:
        await (gate if draw.retry else Gate()).passed()
        return draw.completion

    async def evaluate(step: int, rollout_fn: Any) -> dict[str, float]:
        evaluations.append(step)
        await (gate if len(evaluations) > 1 else Gate()).passed()
        return {"skill": len(evaluations)}

    monkeypatch.setattr(liveness, "INTERVAL", 2.0)
    former = await start(Script(play, evaluate=evaluate), rows=1)
    await until(lambda: len(former.script.begun) == 2 and evaluations == [0])
    await former.handle.terminate("a test")
    run = await farm.resume(former)
    await until(lambda: len(run.script.begun) == 4 and evaluations == [0, 0])

    await until(lambda: len(run.script.cancelled) == 2)
    for name in ("row-0.0", "eval-0"):
        child = farm.client.get_workflow_handle(f"{run.id}/{name}")
        await until(partial(is_closed, child), partial(str, name))
    gate.open()
    result = await run.result()
    assert {draw.retry for draw in run.script.cancelled} == {0}
    assert run.trained == ["0i1"]
    assert result.evaluations[0]["eval/skill"] == 2
    assert (await run.status()).notes == []


async def test_a_group_of_a_former_incarnation_leaves_no_outcome(start: Start, farm: Farm):
    """Its dynamic filter was slow. The row has an outcome in the next incarnation."""
    judging, judged = threading.Event(), threading.Event()

    def keep(group: Any) -> bool:
        first = not judging.is_set()
        judging.set()
        return not first or not judged.wait(PATIENCE)

    former = await start(Script(keep=keep), rows=1)
    optimizer = former.trainer.hold("optim_step")
    await until(judging.is_set)
    await former.handle.terminate("a test")
    run = await farm.resume(former)
    await run.trainer.reached("optim_step")
    judged.set()
    child = farm.client.get_workflow_handle(f"{run.id}/row-0.0")
    await until(partial(is_closed, child))
    optimizer.open()
    await run.result()
    assert [(group.key.text, group.outcome) for group in run.groups] == [("0i1", "accepted")]
    check_records(run.ref)


@pytest.mark.parametrize(
    "taken", [{"incarnation": 1}, {"first_execution_id": "another"}], ids=["after", "before"]
)
async def test_a_former_incarnation_is_recognized_before_and_after_a_takeover(
    start: Start, farm: Farm, taken
):
    """after: the resumed incarnation owns the folder. before: it doesn't own the folder yet."""
    run = await start(Script(never), rows=1)
    await until(lambda: len(run.script.begun) == 2)
    former = RunIncarnation(run=run.ref, incarnation=0)
    assert await ReconciliationActivities(farm.client).run_is_open(former)
    run.store.put_json(OWNER_KEY, run.store.get_json(OWNER_KEY) | taken)
    assert not await ReconciliationActivities(farm.client).run_is_open(former)
    await until(lambda: len(run.script.cancelled) == 2)


async def is_closed(workflow: WorkflowHandle[Any, Any]) -> bool:
    return (await workflow.describe()).status != WorkflowExecutionStatus.RUNNING
