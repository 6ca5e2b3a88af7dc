"""What gets lost on the way is found again: reports, children, leases."""

import shutil
import threading
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from temporalio import workflow
from temporalio.api.sdk.v1 import WorkflowMetadata

from everburn.learning.rollout_file import read_rollout
from everburn.records import metrics
from everburn.records.ids import GroupKey
from everburn.records.keys import group_key, rollout_key
from everburn.records.verification import check_records
from everburn.trainers.protocol import TrainerStateLostError
from support.farm import Farm, Run, Start
from support.script import Draw, Script, behind, spread
from support.waiting import PATIENCE, Gate, until
from workflows.children.prompt_group import PromptGroup
from workflows.messages import GroupReport, Released
from workflows.run import recorder, state, train_run, watchdog
from workflows.run.train_run import TrainRun


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


async def test_the_outcome_of_a_terminated_group_is_found_in_the_store(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    """It was completed, and not yet reported: the row isn't run again."""
    monkeypatch.setattr(watchdog, "INTERVAL", 1000.0)
    report = PromptGroup._report

    async def hang(group: PromptGroup, message: GroupReport) -> None:
        if message.key.attempt == 0:
            await workflow.wait_condition(lambda: False)
        await report(group, message)

    monkeypatch.setattr(PromptGroup, "_report", hang)
    run = await start_tuned(Script(), rows=1)
    await until(lambda: run.store.exists(group_key(GroupKey(cursor=0))))
    await tunable_farm.client.get_workflow_handle(f"{run.id}/row-0.0").terminate("lost")
    await run.result()
    assert (run.trained, len(run.script.begun)) == (["0"], 2)


async def test_a_terminated_group_gets_no_outcome_any_more(start_tuned: Start, tunable_farm: Farm):
    """Its dynamic filter took its time, and its row is run again."""
    judging, terminated = threading.Event(), threading.Event()

    def keep(group: Any) -> bool:
        first = not judging.is_set()
        judging.set()
        return not first or not terminated.wait(PATIENCE)

    run = await start_tuned(Script(keep=keep), rows=1)
    await until(judging.is_set)
    await tunable_farm.client.get_workflow_handle(f"{run.id}/row-0.0").terminate("lost")
    terminated.set()
    await run.result()
    assert [(group.key.text, group.outcome) for group in run.groups] == [("0.1", "accepted")]
    check_records(run.ref)


async def test_a_group_that_died_is_found_while_others_move(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    """By an execution that continues another, which hears of no child's death."""
    # Executions are shorter than an interval: none would ever look, if each counted from its start.
    monkeypatch.setattr(watchdog, "INTERVAL", 60.0)
    monkeypatch.setattr(watchdog, "CHECK_ANYWAY", 2.0)
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


@pytest.mark.parametrize("told", [True, False], ids=["at once", "by a look"])
async def test_a_terminated_lease_is_replaced(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch, told: bool
):
    """The server tells the execution that asked for the lease, and none that continues it."""
    if told:
        monkeypatch.setattr(watchdog, "INTERVAL", 1000.0)
    else:
        monkeypatch.setattr(train_run, "MAX_HISTORY", 1)
    gate = Gate()
    run = await start_tuned(Script(behind({1: gate})), rows=2)
    await until(lambda: len(run.script.draws(1)) == 2)
    if not told:
        await until(partial(continued, run))
    await tunable_farm.client.get_workflow_handle(f"{run.id}/lease-1").terminate("lost")
    await run.until(lease_epoch=2)
    gate.open()
    await run.result()
    assert [entry.epoch for entry in run.ledger] == [1, 2]


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


async def test_an_evaluation_whose_report_is_being_written_is_not_taken_for_dead(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    written = threading.Event()
    amend = metrics.amend

    def amend_later(*arguments: Any) -> None:
        assert written.wait(60)
        amend(*arguments)

    monkeypatch.setattr(metrics, "amend", amend_later)

    async def evaluate(step: int, rollout_fn: object) -> dict[str, float]:
        return {"skill": step + 1}

    try:
        run = await start_tuned(
            Script(evaluate=evaluate), rows=1, on_any_rollout_failure="fail", evaluation_interval=9
        )
        evaluation = tunable_farm.client.get_workflow_handle(f"{run.id}/eval-0")
        await run.until(waiting_for="the evaluation of the current version")
        await evaluation.result()
        seen = await looked(run)
        await until(lambda: looks(run, seen + 2))
    finally:
        written.set()
    result = await run.result()
    assert result.evaluations[0]["eval/skill"] == 1
    assert (await run.status()).notes == []


async def test_looks_become_rarer_as_long_as_nothing_moves(start_tuned: Start):
    gate = Gate()

    async def play(draw: Draw) -> float:
        await gate.passed()
        return await spread(draw)

    run = await start_tuned(Script(play), rows=1)
    # Pauses grow once the stall is longer than four of them.
    await until(lambda: looks(run, 8))
    history = await run.handle.fetch_history()
    started = [event.timer_started_event_attributes for event in history.events]
    rests = [timer.start_to_fire_timeout.ToTimedelta() for timer in started if timer.timer_id]
    assert rests == sorted(rests) and rests[-1] > rests[0]
    gate.open()
    await run.result()


async def test_a_stall_is_reported_once(start_tuned: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state, "NO_PROGRESS", 1.0)
    gate = Gate()

    async def play(draw: Draw) -> float:
        await gate.passed()
        return await spread(draw)

    run = await start_tuned(Script(play), rows=1)

    async def told() -> bool:
        # A machine that is busy may stand still before, over something else.
        return "1 more prompt groups" in (await run.status()).stall

    await until(told)
    before = await looked(run)
    await until(lambda: looks(run, before + 2))
    status = await run.status()
    assert status.stall.startswith("nothing has moved since ")
    (note,) = [note for note in status.notes if "1 more prompt groups" in note]
    assert note == status.stall
    metadata: WorkflowMetadata = await run.handle.query("__temporal_workflow_metadata")
    assert f"**Stalled: {status.stall}.**" in metadata.current_details
    told_of = [r for r in run.metrics("producer/event") if "producer/waiting_for" in r]
    (record,) = [r for r in told_of if r["producer/waiting_for"] == "1 more prompt groups"]
    assert record["producer/no_progress_s"] >= 1
    gate.open()
    await run.result()
    assert (await run.status()).stall == ""


async def test_a_stall_is_reported_though_the_store_cannot_be_read(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    """It may be what the run waits for."""
    monkeypatch.setattr(state, "NO_PROGRESS", 1.0)
    monkeypatch.setattr(watchdog, "CHECK_TIMEOUT", timedelta(seconds=0.5))
    gate = Gate()
    run = await start_tuned(Script(behind({0: gate})), rows=1)
    await run.until(groups_in_flight=1)
    # A folder in the place of a file can't be read.
    manifest = group_key(GroupKey(cursor=0))
    run.store.put(f"{manifest}/file", b"")
    await until(partial(noted, run, "waiting for 1 more prompt groups"))
    shutil.rmtree(run.store.path(manifest))
    gate.open()
    await run.result()


async def test_a_recovery_that_progresses_is_no_stall(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    """However long it takes: one that is told of begins after what came before it."""
    monkeypatch.setattr(state, "NO_PROGRESS", 0.5)
    gate = Gate()
    run = await start_tuned(Script(behind({1: gate})), rows=2)
    await run.until(step=1, groups_in_flight=1)
    run.trainer.fail_once("forward_backward", TrainerStateLostError("it restarted"), after=1)
    waits = {
        "open": "a trainer session",
        "load_checkpoint": "checkpoint scripted/state-0",
        "optim_step": "the replay of step 1 of 1",
        "publish": "sampler weights of policy v1",
    }
    held = [run.trainer.hold(call) for call in waits]
    gate.open()
    for hold, awaited in zip(held, waits.values(), strict=True):
        await until(partial(noted, run, f"; waiting for {awaited}"))
        hold.open()
    await run.result()


async def noted(run: Run, text: str) -> bool:
    """Whether a note of the run ends so."""
    return any(note.endswith(text) for note in (await run.status()).notes)


async def continued(run: Run) -> bool:
    """Whether another execution has taken over from the run's first."""
    return (await run.handle.describe()).run_id != run.handle.first_execution_run_id


async def looks(run: Run, times: int) -> bool:
    """Whether the watchdog has looked so often."""
    return await looked(run) >= times


async def looked(run: Run) -> int:
    """How often the watchdog has looked."""
    history = await run.handle.fetch_history()
    scheduled = [event.activity_task_scheduled_event_attributes for event in history.events]
    return sum(each.activity_type.name == "reconcile" for each in scheduled)


async def test_the_producer_s_records_are_written_before_a_long_step_ends(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recorder, "MAX_RECORDS", 1)
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 1:
            await gate.passed()
        return draw.completion

    run = await start_tuned(Script(play), rows=2, prompt_groups_per_step=2)
    await until(lambda: run.metrics("producer/event"))
    assert (await run.status()).step == 0
    gate.open()
    await run.result()
