"""A run that ends before its rows: stop, drain, cancel."""

import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import CancelledError

from activities import records
from everburn.trainers.jobs import Readiness, RunProvisioning
from everburn.trainers.protocol import (
    TrainerFailedError,
    TrainerStateLostError,
    TrainerUnavailableError,
)
from support.farm import Farm, Run, Start
from support.script import Draw, Script
from support.waiting import Gate, until
from workflows.children import evaluation, prompt_group, trainer_lease
from workflows.messages import StopRequest
from workflows.run import recovery, session
from workflows.run.train_run import TrainRun


@pytest.fixture
def short_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled activity learns of it by its heartbeats."""
    for module in (prompt_group, evaluation):
        monkeypatch.setattr(module, "HEARTBEAT_TIMEOUT", timedelta(seconds=1))


async def test_a_stop_leaves_the_open_batch_untrained_and_cancels_rollouts(
    start_tuned: Start, short_heartbeats: None
):
    never = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 3:
            await never.passed()
        return draw.completion

    run = await start_tuned(
        Script(play, evaluate=lambda step, rollout_fn: {"skill": step}),
        rows=6,
        prompt_groups_per_step=2,
        evaluation_interval=5,
    )
    await run.until(step=1, groups_ready=1)
    await run.handle.signal(TrainRun.stop)
    result = await run.result()

    assert (result.stopped, result.steps, result.rows) == (True, 1, 2)
    assert (result.checkpoint, run.trained) == ("scripted/state-1", ["0", "1"])
    assert result.evaluations.keys() == {0, 1}
    assert [group.outcome for group in run.groups] == ["accepted"] * 3
    assert run.script.rows_begun == {0, 1, 2, 3}
    assert run.trainer.calls[-2:] == ["save_checkpoint state-1", "close"]
    assert (await run.status()).phase == "stopped"
    await until(lambda: {draw.place for draw in run.script.cancelled} == {(3, 0), (3, 1)})


async def test_user_code_of_a_stopped_run_is_cancelled_within_a_heartbeat(start: Start):
    """A cancelled call that keeps running costs money, and its retry may run at the same time. So
    the heartbeat by which it learns of its cancellation isn't throttled to most of the timeout."""
    never = Gate()

    async def play(draw: Draw) -> float:
        await never.passed()
        return 0.0

    run = await start(Script(play), rows=1)
    await until(lambda: len(run.script.begun) == 2)
    await run.handle.signal(TrainRun.stop)
    stopped = time.monotonic()
    await until(lambda: len(run.script.cancelled) == 2)
    assert time.monotonic() - stopped < 0.7 * prompt_group.HEARTBEAT_TIMEOUT.total_seconds()
    await run.result()


async def test_a_draining_stop_waits_for_rollouts_and_trains_a_batch_they_fill(start: Start):
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 1:
            await gate.passed()
        return draw.completion

    run = await start(Script(play), rows=4, prompt_groups_per_step=2)
    await run.until(groups_ready=1)
    await run.handle.signal(TrainRun.stop, StopRequest(drain=True))
    assert (await run.status()).groups_in_flight == 1
    gate.open()
    result = await run.result()
    assert (result.stopped, result.steps, run.trained) == (True, 1, ["0", "1"])
    assert run.script.cancelled == []
    assert run.script.rows_begun == {0, 1}


async def test_a_draining_stop_also_waits_for_a_group_that_is_retried(start: Start):
    gate = Gate()

    async def play(draw: Draw) -> float | None:
        if draw.row == 1 and draw.retry == 0:
            await gate.passed()
            return None
        return draw.completion

    run = await start(
        Script(play),
        rows=4,
        prompt_groups_per_step=2,
        min_group_size=2,
        max_incomplete_group_retries=1,
    )
    await run.until(groups_ready=1)
    await run.handle.signal(TrainRun.stop, StopRequest(drain=True))
    await run.until(phase="step 1: collecting")
    gate.open()
    result = await run.result()
    assert (result.stopped, result.steps, run.trained) == (True, 1, ["0", "1.1"])


async def test_a_stop_lets_a_sealed_step_finish(start: Start):
    run = await start(Script(), rows=4, prompt_groups_per_step=2)
    optimizer = run.trainer.hold("optim_step")
    await run.trainer.reached("optim_step")
    await run.handle.signal(TrainRun.stop)
    optimizer.open()
    result = await run.result()
    assert (result.stopped, result.steps, result.version, run.trained) == (True, 1, 1, ["0", "1"])
    assert run.script.rows_begun == {0, 1}


async def test_cancelling_a_run_cleans_up_without_a_final_checkpoint(
    start_tuned: Start, tunable_farm: Farm, short_heartbeats: None
):
    never = Gate()

    async def play(draw: Draw) -> float:
        await never.passed()
        return 0.0

    async def evaluate(step: int, rollout_fn: Any) -> dict[str, float]:
        await rollout_fn({}, cursor_index=0, rollout_idx=0)
        return {}

    run = await start_tuned(Script(play, evaluate=evaluate), rows=2, prompt_groups_per_step=2)
    await until(lambda: len(run.script.begun) == 5)
    await run.handle.cancel()
    await ends_cancelled(run)

    assert run.trainer.calls[-2:] == ["publish policy-0000-e1", "close"]
    for name in ("row-0.0", "row-1.0", "lease-1", "eval-0"):
        child = tunable_farm.client.get_workflow_handle(f"{run.id}/{name}")
        await until(partial(is_closed, child), partial(str, name))
    await until(lambda: len(run.script.cancelled) == 5)


async def test_a_session_that_opens_for_a_cancelled_run_is_closed(start: Start):
    script = Script()
    opening = script.trainer.hold("open")
    run = await start(script, rows=1)
    await run.trainer.reached("open")
    await run.handle.cancel()
    opening.open()
    await ends_cancelled(run)
    await run.trainer.reached("close")
    assert run.trainer.calls == ["open", "close"]


async def ends_cancelled(run: Run) -> None:
    with pytest.raises(WorkflowFailureError) as failure:
        await run.result()
    assert isinstance(failure.value.cause, CancelledError)


async def is_closed(workflow: WorkflowHandle[Any, Any]) -> bool:
    return (await workflow.describe()).status != WorkflowExecutionStatus.RUNNING


async def test_cancelling_a_run_that_waits_for_a_trainer_takes_seconds(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    """This holds even if the session never opens: the worker that opens it is cancelled."""
    monkeypatch.setattr(trainer_lease, "ACQUIRE_HEARTBEAT", timedelta(seconds=1))
    monkeypatch.setattr(session, "RELEASE_TIMEOUT", timedelta(minutes=5))
    script = Script()
    opening = script.trainer.hold("open")
    run = await start_tuned(script, rows=1)
    await run.trainer.reached("open")
    await run.handle.cancel()
    await ends_cancelled(run)
    lease = tunable_farm.client.get_workflow_handle(f"{run.id}/lease-1")
    await until(partial(is_closed, lease))
    opening.open()
    await run.trainer.reached("close")
    assert run.trainer.calls == ["open", "close"]


async def test_a_stop_before_anything_is_trained_ends_the_run_at_once(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainer_lease, "ACQUIRE_HEARTBEAT", timedelta(seconds=1))
    script = Script()
    opening = script.trainer.hold("open")
    run = await start_tuned(script, rows=1)
    await run.trainer.reached("open")
    await run.handle.signal(TrainRun.stop)
    result = await run.result()
    assert (result.stopped, result.steps, result.checkpoint) == (True, 0, None)
    assert "stopped before it began to train" in (await run.status()).notes
    opening.open()
    await run.trainer.reached("close")
    assert run.script.begun == []


@pytest.mark.parametrize("drain", [False, True])
async def test_a_run_that_is_held_stops_gracefully(start: Start, drain: bool):
    async def play(draw: Draw) -> float:
        if draw.row == 1:
            raise KeyError("tool")
        return draw.completion

    run = await start(Script(play), rows=3, on_fatal="hold")
    await run.until(phase="held")
    await run.handle.signal(TrainRun.stop, StopRequest(drain=drain))
    result = await run.result()
    assert (result.stopped, result.steps, result.rows) == (True, 1, 1)
    assert result.checkpoint == "scripted/state-1"
    assert run.trainer.calls[-2:] == ["save_checkpoint state-1", "close"]
    status = await run.status()
    assert (status.phase, status.error) == ("stopped", None)
    assert any("stopped while it was held" in note and "tool" in note for note in status.notes)


async def test_a_stop_does_not_repeat_a_step_that_kills_its_trainer(start: Start):
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 1:
            await gate.passed()
        return draw.completion

    run = await start(Script(play), rows=2, on_fatal="hold")
    await run.until(step=1, groups_in_flight=1)
    run.trainer.refuse("optim_step", TrainerFailedError("out of memory"))
    # Otherwise a recovery would replay step 1, which needs the optimizer, too.
    await run.handle.execute_update(TrainRun.checkpoint)
    gate.open()
    await run.until(phase="held")
    assert run.trainer.count("optim_step") == 4
    await run.handle.signal(TrainRun.stop)
    result = await run.result()
    assert (result.stopped, result.steps, result.checkpoint) == (True, 1, "scripted/state-1")
    assert run.trainer.count("optim_step") == 4


async def in_a_hopeless_recovery(start: Start, **fields: Any) -> Run:
    """A run that has lost its trainer at step 2 and finds no other."""
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 1:
            await gate.passed()
        return draw.completion

    run = await start(Script(play), rows=2, **fields)
    await run.until(step=1, groups_in_flight=1)
    run.trainer.fail_once("optim_step", TrainerStateLostError("the service restarted"), after=1)
    run.trainer.refuse("open", TrainerUnavailableError("no capacity"))
    gate.open()
    await until(lambda: run.trainer.count("open") >= 2)
    return run


async def test_a_stop_ends_a_recovery_that_finds_no_trainer(start: Start):
    run = await in_a_hopeless_recovery(start, dcp_save_interval=1)
    await run.handle.signal(TrainRun.stop)
    result = await run.result()
    assert (result.stopped, result.steps, result.checkpoint) == (True, 1, "scripted/state-1")
    assert run.trained == ["0"]
    assert [group.outcome for group in run.groups] == ["accepted"] * 2


async def test_a_stop_waits_for_a_trainer_to_save_with_for_a_limited_time(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    """Steps after the last checkpoint are in the ledger."""
    monkeypatch.setattr(recovery, "STOP_PATIENCE", 2.0)
    run = await in_a_hopeless_recovery(start_tuned, output_model_id="the-policy")
    await run.handle.signal(TrainRun.stop)
    opened = run.trainer.count("open")
    result = await run.result()
    assert (result.stopped, result.steps, result.checkpoint) == (True, 1, "scripted/state-0")
    assert result.model is None
    assert run.trainer.count("open") > opened
    assert run.trained == ["0"]
    (note, *_) = [note for note in (await run.status()).notes if "no trainer session" in note]
    assert "the final checkpoint and the promotion" in note
    assert f"everburn resume {run.id}" in note


async def test_a_stop_waits_for_no_trainer_if_nothing_needs_one(start: Start):
    run = await in_a_hopeless_recovery(start, save_final_checkpoint=False)
    await run.handle.signal(TrainRun.stop)
    result = await run.result()
    assert (result.stopped, result.steps, result.checkpoint) == (True, 1, "scripted/state-0")


@pytest.mark.parametrize("held", [False, True], ids=["paused", "held"])
async def test_a_draining_stop_starts_no_further_attempt_of_an_incomplete_row(
    start: Start, held: bool
):
    """The next attempt of an incomplete row starts only while admission is open."""
    gate = Gate()

    async def play(draw: Draw) -> float | None:
        if draw.row == 1:
            await gate.passed()
            return None if draw.retry == 0 else draw.completion
        if held and draw.row == 2:
            raise KeyError("tool")
        return draw.completion

    run = await start(
        Script(play),
        rows=3 if held else 2,
        prompt_groups_per_step=3 if held else 2,
        min_group_size=2,
        max_incomplete_group_retries=1,
        on_fatal="hold",
    )
    if held:
        await run.until(phase="held")
    else:
        await run.until(groups_ready=1, groups_in_flight=1)
        await run.handle.execute_update(TrainRun.pause)
    gate.open()
    await run.until(groups_in_flight=0)
    await run.handle.signal(TrainRun.stop, StopRequest(drain=True))
    result = await run.result()
    assert result.stopped
    # The row that was retried after the hold is complete, and untrained like its whole batch.
    again = {(group.key.cursor, group.key.attempt) for group in run.groups}
    assert again == ({(0, 0), (1, 0), (1, 1)} if held else {(0, 0), (1, 0)})


async def test_a_resume_while_the_run_ends_starts_no_further_attempt(start: Start):
    """At the draining stop, the row's next attempt was waiting for the end of a pause."""
    gate = Gate()

    async def play(draw: Draw) -> float | None:
        if draw.row == 1:
            await gate.passed()
            return None
        return draw.completion

    script = Script(play)
    saving = script.trainer.hold("save_checkpoint state-1")
    run = await start(script, rows=2, min_group_size=2, max_incomplete_group_retries=1)
    await run.until(step=1, groups_in_flight=1)
    await run.handle.execute_update(TrainRun.pause)
    await run.handle.signal(TrainRun.stop, StopRequest(drain=True))
    gate.open()
    await run.trainer.reached("save_checkpoint state-1")
    await run.handle.execute_update(TrainRun.resume)
    assert (await run.status()).groups_in_flight == 0
    saving.open()
    result = await run.result()
    assert (result.stopped, result.steps, result.checkpoint) == (True, 1, "scripted/state-1")
    assert [draw.retry for draw in run.script.draws(1)] == [0, 0]


@pytest.mark.parametrize("over", ["sandboxes of rollouts", "job and deployment"])
async def test_a_run_can_be_cancelled_during_its_cleanup(
    start: Start, monkeypatch: pytest.MonkeyPatch, over: str
):
    """The cleanup is completed nevertheless. The test replaces the control plane's answers."""
    begun, cancelled = threading.Event(), threading.Event()
    given_back: list[str] = []

    def wait_for_cancellation(*args: Any) -> Any:
        given_back.append(over)
        if not cancelled.is_set():
            begun.set()
            assert cancelled.wait(30)
        return [] if over == "sandboxes of rollouts" else "given back"

    ready = Readiness("ready", "job and deployment are ready")
    monkeypatch.setattr(RunProvisioning, "advance", lambda self: ready)
    monkeypatch.setattr(RunProvisioning, "clean_up", lambda self: "given back")
    if over == "sandboxes of rollouts":
        monkeypatch.setattr(records, "sandbox_keys", wait_for_cancellation)
    else:
        monkeypatch.setattr(RunProvisioning, "clean_up", wait_for_cancellation)
    run = await start(Script(), rows=1, backend="emulator-dedicated")
    await until(begun.is_set)
    await run.handle.cancel()
    await run.until(phase="cancelling")
    cancelled.set()
    await ends_cancelled(run)
    assert given_back == [over, over]
