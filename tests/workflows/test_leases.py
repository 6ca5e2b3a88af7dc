"""The trainer session under a lease: its loss, what is refused, and how it is given back."""

import asyncio
from datetime import timedelta

import pytest
from temporalio import activity

from activities import heartbeats
from everburn.trainers import (
    KeyRefusedError,
    QuotaExceededError,
    TrainerCapacityError,
    TrainerRejectedError,
    TrainerStateLostError,
    TrainerUnavailableError,
)
from support.farm import Start
from support.script import Draw, Script
from support.waiting import Gate
from workflows import recovery, trainer_lease

LOST = TrainerStateLostError("the service restarted")


async def test_a_lost_session_is_replaced_and_its_step_is_taken_again(start: Start):
    run = await start(Script(), rows=3)
    run.trainer.fail_once("optim_step", LOST, after=1)
    result = await run.result()
    assert (result.steps, result.version, run.trained) == (3, 3, ["0", "1", "2"])
    assert [entry.epoch for entry in run.ledger] == [1, 2, 2]
    calls = run.trainer.mutations
    second = calls[calls.index("open", 1) :]
    assert [call for call in second if call != "close"] == [
        "open",
        "load_checkpoint scripted/state-0",
        "forward_backward 2",  # step 1, from the ledger
        "optim_step",
        "publish policy-0001-e2",
        "forward_backward 2",
        "optim_step",
        "publish policy-0002-e2",
        "forward_backward 2",
        "optim_step",
        "publish policy-0003-e2",
        "save_checkpoint state-3",
    ]
    assert len(run.script.begun) == 6  # no rollout is made again
    assert run.metrics()[-1]["recovery/leases"] == 2


async def test_a_session_lost_at_a_checkpoint_leaves_its_step_published_once(start: Start):
    run = await start(Script(), rows=2, dcp_save_interval=1, save_final_checkpoint=False)
    run.trainer.fail_once("save_checkpoint state-1", LOST)
    result = await run.result()
    assert (result.steps, result.version) == (2, 2)
    assert [(entry.step, entry.version) for entry in run.ledger] == [(1, 1), (2, 2)]
    assert run.trained == ["0", "1"]


async def test_a_step_that_costs_its_trainer_again_and_again_ends_the_run(start: Start):
    script = Script()
    script.trainer.refuse("optim_step", LOST)
    run = await start(script, rows=2, prompt_groups_per_step=2)
    failure = await run.failure()
    assert failure.type == "StepKillsTrainer"
    assert "step 1 lost its trainer 3 times; its rows are 0-1" in failure.message
    assert "the service restarted" in failure.message
    assert run.trainer.count("optim_step") == 3
    assert run.ledger == []


async def test_a_refused_request_ends_the_run_with_its_text(start: Start):
    script = Script()
    script.trainer.refuse("forward_backward", TrainerRejectedError("datum 0 has 3 logprobs for 2"))
    run = await start(script, rows=1)
    failure = await run.failure()
    assert failure.type == "TrainerRejectedError"
    assert "datum 0 has 3 logprobs for 2" in failure.message
    assert run.trainer.mutations[-2:] == ["forward_backward 2", "close"]
    assert run.trainer.count("open") == 1


async def test_a_refused_request_ends_the_run_before_its_batch_is_full(start: Start):
    never = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 1:
            await never.passed()
        return draw.completion

    script = Script(play)
    script.trainer.refuse("forward_backward", TrainerRejectedError("too long"))
    run = await start(script, rows=2, prompt_groups_per_step=2)
    failure = await run.failure()
    assert (failure.type, "too long" in failure.message) == ("TrainerRejectedError", True)
    never.open()


async def test_without_a_session_the_run_fails_and_says_why(start_tuned: Start):
    script = Script()
    script.trainer.refuse("open", TrainerUnavailableError("no model named 'scripted'"))
    run = await start_tuned(script, rows=1)
    failure = await run.failure()
    assert failure.type == "TrainerUnavailableError"
    assert "no model named 'scripted'" in failure.message
    assert set(run.trainer.calls) == {"open"}


async def test_a_holder_that_falls_silent_is_noticed_and_replaced(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    """Its process is dead, or as good as: the run doesn't wait for it, nor for its requests."""
    monkeypatch.setattr(trainer_lease, "HOLD_HEARTBEAT", timedelta(seconds=1))
    beat = heartbeats._beat
    holders: list[str | None] = []

    async def beat_unless_first(interval: timedelta) -> None:
        if activity.info().activity_type == "hold_lease":
            holders.append(activity.info().workflow_id)
            if len(holders) == 1:
                await asyncio.Event().wait()
        await beat(interval)

    monkeypatch.setattr(heartbeats, "_beat", beat_unless_first)
    run = await start_tuned(Script(), rows=1)
    stuck = run.trainer.hold("optim_step")
    await run.until(lease_epoch=2)
    stuck.open()
    await run.result()
    assert [entry.epoch for entry in run.ledger] == [2]
    assert run.trainer.count("close") == 2  # the old session costs nothing any more


async def test_capacity_is_waited_for_also_at_the_start(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recovery, "BACKOFF", (0,))
    monkeypatch.setattr(trainer_lease, "ACQUIRE_ATTEMPTS", 1)
    script = Script()
    script.trainer.fail_once("open", TrainerCapacityError("all trainers are taken"))
    run = await start_tuned(script, rows=1)
    result = await run.result()
    assert (result.steps, run.trainer.count("open")) == (1, 2)


async def test_a_run_that_waits_for_capacity_can_be_stopped(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainer_lease, "ACQUIRE_ATTEMPTS", 1)
    script = Script()
    script.trainer.refuse("open", TrainerCapacityError("all trainers are taken"))
    run = await start_tuned(script, rows=1)
    status = await run.until(phase="waiting for capacity")
    assert "all trainers are taken" in status.waiting_for
    await run.handle.signal("stop")
    failure = await run.failure()
    assert "stopped before there was a trainer" in failure.message


async def test_a_quota_that_is_used_up_holds_the_run_whatever_on_fatal_says(start: Start):
    run = await start(Script(), rows=2)
    run.trainer.fail_once("optim_step", QuotaExceededError("add credit"))
    held = await run.until(phase="held")
    assert held.error is not None and "add credit" in held.error
    await run.handle.execute_update("resume")
    result = await run.result()
    assert (result.steps, run.trained) == (2, ["0", "1"])
    assert run.trainer.count("open") == 2


async def test_a_key_that_is_refused_fails_the_run(start: Start):
    run = await start(Script(), rows=1)
    run.trainer.fail_once("optim_step", KeyRefusedError("the key in MY_KEY is refused"))
    failure = await run.failure()
    assert failure.type == "KeyRefusedError"
    assert "MY_KEY" in failure.message


async def test_a_key_that_is_refused_at_the_start_can_be_mended_while_the_run_holds(start: Start):
    script = Script()
    script.trainer.fail_once("open", KeyRefusedError("the key in MY_KEY is refused"))
    run = await start(script, rows=1, on_fatal="hold")
    held = await run.until(phase="held")
    assert held.error is not None and "MY_KEY" in held.error
    await run.handle.execute_update("resume")
    assert (await run.result()).steps == 1


async def test_a_sampler_that_serves_other_weights_ends_the_run_before_it_publishes(start: Start):
    script = Script()
    script.trainer.served = -1.5
    run = await start(script, rows=1)
    failure = await run.failure()
    assert failure.type == "PublicationMismatchError"
    assert "doesn't serve what was trained" in failure.message
    assert "differ from the trainer's by 0.5" in failure.message
    assert script.begun == []
