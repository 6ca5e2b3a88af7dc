"""What gets lost on the way is found again: reports, children, leases."""

from functools import partial

import pytest
from temporalio.api.sdk.v1 import WorkflowMetadata

from everburn.learning.rollout_file import read_rollout
from everburn.refs import GroupKey, rollout_key
from support.farm import Farm, Run, Start
from support.script import Draw, Script, spread
from support.waiting import Gate, until
from workflows import train_run, watchdog
from workflows.messages import GroupReport, Released
from workflows.prompt_group import PromptGroup
from workflows.train_run import TrainRun


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "INTERVAL", 0.2)


async def test_a_report_that_got_lost_is_found_in_the_store(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    async def lose(group: PromptGroup, name: str, message: Released | GroupReport) -> None:
        """The signal is sent to nobody."""

    monkeypatch.setattr(PromptGroup, "_signal", lose)
    run = await start_tuned(Script(), rows=1)
    await run.result()
    assert run.trained == ["0"]
    assert len(run.script.begun) == 2


async def test_a_terminated_group_is_run_again(start_tuned: Start, tunable_farm: Farm):
    """What it had finished isn't sampled again."""

    async def play(draw: Draw) -> float:
        if draw.completion == 1 and draw.tries == 0:
            await Gate().passed()
        return await spread(draw)

    run = await start_tuned(Script(play), rows=1)
    finished = rollout_key(GroupKey(cursor=0), 0)
    await until(lambda: run.store.exists(finished) and len(run.script.begun) == 2)
    await tunable_farm.client.get_workflow_handle(f"{run.id}/row-0.0").terminate("lost")
    result = await run.result()
    assert (result.rows, run.trained) == (1, ["0.1"])
    assert [draw.completion for draw in run.script.ended] == [0, 1]
    (group,) = run.groups
    first = read_rollout(run.store, group.members[0].stored)[0]
    assert (first.attempt, first.completion) == (1, 0)
    assert result.recovered is not None
    assert result.recovered.reused_rollouts == 1


async def test_a_group_that_died_is_found_while_others_move(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    """By an execution that continues another, which hears of no child's death."""
    monkeypatch.setattr(watchdog, "INTERVAL", 0.3)
    monkeypatch.setattr(train_run, "MAX_HISTORY", 200)

    async def play(draw: Draw) -> float:
        if draw.row == 0 and draw.tries == 0:
            await Gate().passed()
        return await spread(draw)

    # Far more rows than it takes: something moves all the time.
    run = await start_tuned(Script(play), rows=1000, max_head_offpolicy_versions=3)
    await until(partial(continued, run))
    await tunable_farm.client.get_workflow_handle(f"{run.id}/row-0.0").terminate("lost")
    await until(lambda: len(run.script.draws(0)) == 4)
    assert len(run.script.rows_begun) < 1000
    await run.handle.signal(TrainRun.stop)
    await run.result()


async def test_a_terminated_lease_is_replaced(start_tuned: Start, tunable_farm: Farm):
    gate = Gate()

    async def play(draw: Draw) -> float:
        await gate.passed()
        return await spread(draw)

    run = await start_tuned(Script(play), rows=1)
    await until(lambda: len(run.script.begun) == 2)
    await tunable_farm.client.get_workflow_handle(f"{run.id}/lease-1").terminate("lost")
    await run.until(lease_epoch=2)
    gate.open()
    await run.result()
    assert [entry.epoch for entry in run.ledger] == [2]


async def test_a_terminated_evaluation_is_not_waited_for(start_tuned: Start, tunable_farm: Farm):
    async def evaluate(step: int, rollout_fn: object) -> dict[str, float]:
        if step == 0:
            await Gate().passed()
        return {"skill": step}

    run = await start_tuned(Script(evaluate=evaluate), rows=1)
    await run.until(waiting_for="the evaluation of the current version")
    await tunable_farm.client.get_workflow_handle(f"{run.id}/eval-0").terminate("lost")
    result = await run.result()
    assert result.evaluations[1]["eval/skill"] == 1
    assert any("evaluation of version 0" in note for note in (await run.status()).notes)


async def test_a_standstill_is_told_once(start_tuned: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "NO_PROGRESS", 1.0)
    gate = Gate()

    async def play(draw: Draw) -> float:
        await gate.passed()
        return await spread(draw)

    run = await start_tuned(Script(play), rows=1)

    async def told() -> bool:
        return (await run.status()).standstill != ""

    await until(told)
    before = await looks(run)

    async def looked_again() -> bool:
        return await looks(run) >= before + 2

    await until(looked_again)
    status = await run.status()
    (note,) = status.notes
    assert "nothing has moved" in note and "1 more prompt groups" in note
    assert "1 more prompt groups" in status.standstill
    metadata: WorkflowMetadata = await run.handle.query("__temporal_workflow_metadata")
    assert f"**Standstill: {status.standstill}.**" in metadata.current_details
    (record,) = [r for r in run.metrics("producer/event") if "producer/waiting_for" in r]
    assert record["producer/waiting_for"] == "1 more prompt groups"
    assert record["producer/no_progress_s"] >= 1
    gate.open()
    await run.result()
    assert (await run.status()).standstill == ""


async def continued(run: Run) -> bool:
    """Whether another execution has taken over from the run's first."""
    return (await run.handle.describe()).run_id != run.handle.first_execution_run_id


async def looks(run: Run) -> int:
    """How often the watchdog has looked."""
    history = await run.handle.fetch_history()
    scheduled = [event.activity_task_scheduled_event_attributes for event in history.events]
    return sum(each.activity_type.name == "reconcile" for each in scheduled)
