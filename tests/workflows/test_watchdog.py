"""Lost reports, children and leases are found by the watchdog."""

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


async def test_a_lost_report_is_found_in_the_store(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    async def lose(group: PromptGroup, name: str, message: Released | GroupReport) -> None:
        """The signal is not sent."""

    monkeypatch.setattr(PromptGroup, "_signal", lose)
    run = await start_tuned(Script(), rows=1)
    await run.result()
    assert run.trained == ["0"]
    assert len(run.script.begun) == 2


async def test_a_terminated_group_is_run_again(start_tuned: Start, tunable_farm: Farm):
    """Its finished completions aren't sampled again."""

    async def play(draw: Draw) -> float:
        if draw.completion == 1 and draw.retry == 0:
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
    """The group was complete but not yet reported: the row isn't repeated."""
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


async def test_a_terminated_group_gets_no_outcome(start_tuned: Start, tunable_farm: Farm):
    """Its dynamic filter was slow, and its row is repeated."""
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


async def test_a_terminated_group_is_found_while_others_progress(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    """An execution after continue-as-new finds it: the server doesn't notify it of a child's
    end."""
    # Executions are shorter than an interval: if each counted from its start, none would check.
    monkeypatch.setattr(watchdog, "INTERVAL", 60.0)
    monkeypatch.setattr(watchdog, "CHECK_ANYWAY", 2.0)
    monkeypatch.setattr(train_run, "MAX_HISTORY", 200)

    async def play(draw: Draw) -> float:
        if draw.row == 0 and draw.retry == 0:
            await Gate().passed()
        return await spread(draw)

    # Far more rows than needed: the run progresses all the time.
    run = await start_tuned(Script(play), rows=1000, max_head_offpolicy_versions=3)
    await until(partial(continued, run))
    await tunable_farm.client.get_workflow_handle(f"{run.id}/row-0.0").terminate("lost")
    await until(lambda: len(run.script.draws(0)) == 4)
    assert len(run.script.rows_begun) < 1000
    await run.handle.signal(TrainRun.stop)
    await run.result()


@pytest.mark.parametrize("notified", [True, False], ids=["at once", "by the watchdog"])
async def test_a_terminated_lease_is_replaced(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch, notified: bool
):
    """The server notifies only the execution that started the lease, not those that continue it."""
    if notified:
        monkeypatch.setattr(watchdog, "INTERVAL", 1000.0)
    else:
        monkeypatch.setattr(train_run, "MAX_HISTORY", 1)
    gate = Gate()
    run = await start_tuned(Script(behind({1: gate})), rows=2)
    await until(lambda: len(run.script.draws(1)) == 2)
    if not notified:
        await until(partial(continued, run))
    await tunable_farm.client.get_workflow_handle(f"{run.id}/lease-1").terminate("lost")
    await run.until(lease_epoch=2)
    gate.open()
    await run.result()
    assert [entry.lease_epoch for entry in run.ledger] == [1, 2]


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


async def test_an_evaluation_that_is_writing_its_report_is_waited_for(
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
        seen = await checks_so_far(run)
        await until(lambda: has_checked(run, seen + 2))
    finally:
        written.set()
    result = await run.result()
    assert result.evaluations[0]["eval/skill"] == 1
    assert (await run.status()).notes == []


async def test_checks_become_rarer_while_nothing_progresses(start_tuned: Start):
    gate = Gate()

    async def play(draw: Draw) -> float:
        await gate.passed()
        return await spread(draw)

    run = await start_tuned(Script(play), rows=1)
    # Pauses grow once the stall is longer than four of them.
    await until(lambda: has_checked(run, 8))
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

    async def is_reported() -> bool:
        # On a busy machine the run may stall earlier, for another reason.
        return "1 more prompt groups" in (await run.status()).stall

    await until(is_reported)
    before = await checks_so_far(run)
    await until(lambda: has_checked(run, before + 2))
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


async def test_a_stall_is_reported_even_if_the_store_cannot_be_read(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    """The store may be the cause of the stall."""
    monkeypatch.setattr(state, "NO_PROGRESS", 1.0)
    monkeypatch.setattr(watchdog, "CHECK_TIMEOUT", timedelta(seconds=0.5))
    gate = Gate()
    run = await start_tuned(Script(behind({0: gate})), rows=1)
    await run.until(groups_in_flight=1)
    # A folder in place of a file can't be read.
    manifest = group_key(GroupKey(cursor=0))
    run.store.put(f"{manifest}/file", b"")
    await until(partial(noted, run, "waiting for 1 more prompt groups"))
    shutil.rmtree(run.store.path(manifest))
    gate.open()
    await run.result()


async def test_a_recovery_that_progresses_is_not_a_stall(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    """A recovery may take long: a stall is measured from the last progress of the recovery."""
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
    """Whether a note of the run ends with this text."""
    return any(note.endswith(text) for note in (await run.status()).notes)


async def continued(run: Run) -> bool:
    """Whether the run has continued as new."""
    return (await run.handle.describe()).run_id != run.handle.first_execution_run_id


async def has_checked(run: Run, times: int) -> bool:
    """Whether the watchdog has checked this often."""
    return await checks_so_far(run) >= times


async def checks_so_far(run: Run) -> int:
    """How often the watchdog has checked."""
    history = await run.handle.fetch_history()
    scheduled = [event.activity_task_scheduled_event_attributes for event in history.events]
    return sum(each.activity_type.name == "reconcile" for each in scheduled)


async def test_the_producers_records_are_written_before_a_long_step_ends(
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
