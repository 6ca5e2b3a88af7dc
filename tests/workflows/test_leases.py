"""The trainer session under a lease: lease failures, refusals, and how it is closed."""

import asyncio
import dataclasses
from datetime import timedelta

import pytest
from temporalio import activity
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities import heartbeats
from activities.messages import LeaseRef
from activities.trainer import TrainerActivities
from everburn.config import RunConfig
from everburn.records.store import StoreError
from everburn.trainers.protocol import (
    KeyRefusedError,
    QuotaExceededError,
    TrainerCapacityError,
    TrainerFailedError,
    TrainerRejectedError,
    TrainerStateLostError,
    TrainerUnavailableError,
)
from support.activities import execute
from support.farm import Farm, Start
from support.script import Draw, Script
from support.trainer import ScriptedTrainer
from support.waiting import Gate
from workflows.children import trainer_lease
from workflows.run import recovery
from workflows.run import start as first_lease
from workflows.run.ui import describe

LOST = TrainerStateLostError("the service restarted")


async def test_a_lost_session_is_replaced_and_its_step_is_repeated(start: Start):
    run = await start(Script(), rows=3)
    run.trainer.fail_once("optim_step", LOST, after=1)
    result = await run.result()
    assert (result.steps, result.version, run.trained) == (3, 3, ["0", "1", "2"])
    assert [entry.lease_epoch for entry in run.ledger] == [1, 2, 2]
    calls = run.trainer.calls
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
    assert len(run.script.begun) == 6  # no rollout is repeated


async def test_versions_that_rollouts_still_use_are_published_again(start: Start):
    """The version of the checkpoint is published again, too."""
    gates = {1: Gate(), 2: Gate()}

    async def play(draw: Draw) -> float:
        if draw.row in gates:
            await gates[draw.row].passed()
        return draw.completion

    # Rows 0 and 1 are admitted at v0, row 2 at v1, row 3 at v2.
    run = await start(Script(play), rows=5, max_head_offpolicy_versions=1)
    await run.until(step=1, groups_in_flight=2)
    run.trainer.fail_once("optim_step", LOST)
    gates[2].open()
    await run.until(step=2, lease_epoch=2)
    gates[1].open()
    await run.result()
    calls = run.trainer.calls
    published = [call for call in calls[calls.index("open", 1) :] if call.startswith("publish")]
    assert published[:3] == [
        "publish policy-0000-e2",
        "publish policy-0001-e2",
        "publish policy-0002-e2",
    ]


async def test_the_cost_of_a_lease_failure_is_recorded_and_shown(start: Start):
    run = await start(Script(), rows=3)
    run.trainer.fail_once("optim_step", LOST, after=1)
    result = await run.result()

    before, after, last = run.metrics()
    assert not any(name.startswith("recovery/") for name in before)
    recovered = result.recovered
    assert recovered is not None
    assert (recovered.leases, recovered.redone_steps, recovered.reused_rollouts) == (2, 1, 2)
    assert 0 < recovered.seconds < after["perf/step_time"]
    for record in (after, last):
        assert {k: v for k, v in record.items() if k.startswith("recovery/")} == {
            "recovery/leases": 2,
            "recovery/redone_steps": 1,
            "recovery/rollouts_reused": 2,
            "recovery/seconds": recovered.seconds,
        }
    status = await run.status()
    assert status.recovered == recovered
    assert recovered.text.startswith("2 trainer sessions, 1 step replayed, 2 rollouts reused, ")
    assert f"| recovered | {recovered.text} |" in describe(status)


async def test_a_session_lost_at_a_checkpoint_leaves_its_step_published_once(start: Start):
    run = await start(Script(), rows=2, dcp_save_interval=1, save_final_checkpoint=False)
    run.trainer.fail_once("save_checkpoint state-1", LOST)
    result = await run.result()
    assert (result.steps, result.version) == (2, 2)
    assert [(entry.step, entry.version) for entry in run.ledger] == [(1, 1), (2, 2)]
    assert run.trained == ["0", "1"]


async def test_a_step_with_the_same_failure_on_three_leases_ends_the_run(
    start: Start,
):
    script = Script()
    # Text that differs between leases doesn't make it another failure.
    for lease in (1, 2, 3):
        script.trainer.fail_once(
            "optim_step",
            TrainerFailedError(f"out of memory in request 7f3a{lease}"),
            after=lease - 1,
        )
    run = await start(script, rows=2, prompt_groups_per_step=2, on_fatal="fail")
    failure = await run.failure()
    assert failure.type == "StepKillsTrainer"
    assert "step 1 (rows 0-1): on 3 leases in a row the service answered" in failure.message
    assert "out of memory" in failure.message
    assert run.trainer.count("optim_step") == 3
    assert run.ledger == []


async def test_a_step_with_a_different_failure_each_time_continues(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recovery, "PAUSES", (0,))
    script = Script()
    errors = ["out of memory", "no space left", "out of memory", "no space left", "out of memory"]
    for count, error in enumerate(errors):
        script.trainer.fail_once("optim_step", TrainerFailedError(error), after=count)
    run = await start_tuned(script, rows=1)
    assert (await run.result()).steps == 1
    assert [entry.attempts for entry in run.ledger] == [len(errors) + 1]


async def test_a_step_whose_leases_fail_ten_times_in_a_row_holds_the_run(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recovery, "PAUSES", (0,))
    script = Script()
    script.trainer.refuse("optim_step", LOST)
    run = await start_tuned(script, rows=2, prompt_groups_per_step=2)
    held = await run.until(phase="held")
    assert "step 1 (rows 0-1): 10 leases in a row failed while its requests" in (held.error or "")
    assert "the service restarted" in (held.error or "")
    assert run.trainer.count("optim_step") == recovery.INTERRUPTED
    script.trainer.mend()
    await run.handle.execute_update("resume")
    assert (await run.result()).steps == 1


async def test_leases_that_fail_between_steps_count_against_no_step(start: Start, farm: Farm):
    """There are twice as many failures as the limit for a step, without a pause between them."""
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 1:
            await gate.passed()
        return draw.completion

    run = await start(Script(play), rows=2, max_head_offpolicy_versions=1)
    await run.until(step=1)
    for lease in range(1, 2 * recovery.INTERRUPTED + 1):
        await run.until(lease_epoch=lease, phase="step 2: collecting")
        await farm.client.get_workflow_handle(f"{run.id}/lease-{lease}").terminate()
    await run.until(lease_epoch=2 * recovery.INTERRUPTED + 1, phase="step 2: collecting")
    gate.open()
    assert (await run.result()).steps == 2
    assert [entry.attempts for entry in run.ledger] == [1, 2 * recovery.INTERRUPTED + 1]


async def test_the_pauses_between_leases_grow_and_are_shown(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    assert list(recovery.PAUSES) == sorted(recovery.PAUSES)
    assert (recovery.PAUSES[1], recovery.PAUSES[-1]) == (0, 60)
    monkeypatch.setattr(recovery, "PAUSES", (0, 0, 3600))
    script = Script()
    script.trainer.refuse("optim_step", LOST)
    run = await start_tuned(script, rows=1)
    await run.until(waiting_for="a pause of 3600 s: 2 leases in a row failed")
    assert run.trainer.count("optim_step") == 2
    await run.handle.signal("stop")
    assert (await run.result()).steps == 0


async def test_a_held_run_continues_with_a_restored_trainer(start: Start):
    """The session in doubt isn't used again, even if it is still open; and no row is admitted
    before the version is published again."""
    script = Script()
    # Refused after successful backwards: the session is open, but its weights are in doubt.
    script.trainer.refuse("optim_step", TrainerRejectedError("no gradients"))
    run = await start(script, rows=4, max_head_offpolicy_versions=0)
    held = await run.until(phase="held")
    assert "step 1 (rows 0): on 3 leases in a row the service answered" in (held.error or "")
    assert run.script.rows_begun == {0}
    script.trainer.mend()
    loading = script.trainer.hold("load_checkpoint")
    before = len(run.trainer.calls)
    await run.handle.execute_update("resume")
    await run.trainer.reached("load_checkpoint", times=3)
    assert run.script.rows_begun == {0}
    loading.open()
    assert (await run.result()).steps == 4
    after = [call for call in run.trainer.calls[before:] if call != "close"]
    assert after[:5] == [
        "open",
        "load_checkpoint scripted/state-0",
        "publish policy-0000-e4",
        "forward_backward 2",
        "optim_step",
    ]
    assert [entry.attempts for entry in run.ledger] == [4, 1, 1, 1], "one per lease"


async def test_an_older_checkpoint_is_loaded_if_the_newest_does_not_load(start: Start):
    run = await start(Script(), rows=4, dcp_save_interval=1)
    for broken in ("state-2", "state-1"):
        run.trainer.refuse(
            f"load_checkpoint scripted/{broken}", TrainerRejectedError("its file is damaged")
        )
    run.trainer.fail_once("optim_step", LOST, after=2)
    result = await run.result()

    assert (result.steps, run.trained) == (4, ["0", "1", "2", "3"])
    second = run.trainer.calls[run.trainer.calls.index("open", 1) :]
    assert [call for call in second if call != "close"][:8] == [
        "open",
        "load_checkpoint scripted/state-2",
        "load_checkpoint scripted/state-1",
        "load_checkpoint scripted/state-0",
        "forward_backward 2",
        "optim_step",
        "forward_backward 2",
        "optim_step",
    ]
    notes = (await run.status()).notes
    assert [note.partition(",")[0] for note in notes] == [
        "scripted/state-2 doesn't load",
        "scripted/state-1 doesn't load",
    ]


async def test_a_checkpoint_that_was_not_finished_is_never_loaded(start: Start):
    """This includes a checkpoint that the trainer has saved but the ledger doesn't have: trainer
    state and run state belong together."""
    run = await start(Script(), rows=3, dcp_save_interval=2)
    run.trainer.fail_once("save_checkpoint state-2", LOST)
    result = await run.result()

    assert (result.steps, result.version) == (3, 3)
    loads = [call for call in run.trainer.calls if call.startswith("load_checkpoint")]
    assert loads == ["load_checkpoint scripted/state-0"]
    assert [entry.checkpoint for entry in run.ledger] == [None, None, None]


@pytest.mark.parametrize("call", ["forward_backward", "optim_step"])
async def test_no_checkpoint_is_saved_of_weights_that_are_not_finite(start: Start, call: str):
    """A NaN ends the session and spares the run's weights; if it occurs again, the step is
    named."""
    script = Script()
    script.trainer.poison(call)
    run = await start(script, rows=2, dcp_save_interval=1)
    held = await run.until(phase="held")
    assert "on 3 leases in a row the service answered" in (held.error or "")
    assert " is nan: " in (held.error or "")
    assert run.trainer.count("save_checkpoint") == 1  # state-0
    assert {call for call in run.trainer.calls if call.startswith("publish")} == {
        f"publish policy-0000-e{epoch}" for epoch in (1, 2, 3)
    }
    script.trainer.mend()
    await run.handle.execute_update("resume")
    assert (await run.result()).steps == 2


async def test_a_refused_request_ends_the_run_with_its_text(start: Start):
    script = Script()
    script.trainer.refuse("forward_backward", TrainerRejectedError("datum 0 has 3 logprobs for 2"))
    run = await start(script, rows=1)
    failure = await run.failure()
    assert failure.type == "TrainerRejectedError"
    assert "datum 0 has 3 logprobs for 2" in failure.message
    assert run.trainer.calls[-2:] == ["forward_backward 2", "close"]
    assert run.trainer.count("open") == 1


async def test_a_loss_function_that_cannot_be_imported_costs_no_session(start: Start):
    run = await start(Script(), rows=1, loss={"name": "support.losses:no_such_loss"})
    failure = await run.failure()
    assert failure.type == "EntrypointError"
    assert "has no 'no_such_loss'" in failure.message
    assert run.trainer.calls == []


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


@pytest.mark.parametrize(
    ("failure", "awaited"),
    [
        (TrainerUnavailableError("nothing answers"), "the training service"),
        (StoreError("can't read holders: Input/output error"), "the store"),
    ],
    ids=["service", "store"],
)
async def test_a_service_or_a_store_that_is_starting_is_waited_for(
    start_tuned: Start,
    quick_acquisition: None,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    awaited: str,
):
    monkeypatch.setattr(recovery, "BACKOFF", (0.3,))
    script = Script()
    script.trainer.refuse("open", failure)
    run = await start_tuned(script, rows=1)
    waiting = await run.until(phase=f"waiting for {awaited}")
    assert waiting.waiting_for == f"a trainer session: {failure}"
    script.trainer.mend()
    assert (await run.result()).steps == 1


async def test_without_a_session_the_run_fails_and_says_why(
    start_tuned: Start, quick_acquisition: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(first_lease, "START_PATIENCE", 0.0)
    script = Script()
    script.trainer.refuse("open", TrainerUnavailableError("no model named 'scripted'"))
    run = await start_tuned(script, rows=1)
    failure = await run.failure()
    assert failure.type == "TrainerUnavailableError"
    assert "no model named 'scripted'" in failure.message
    assert set(run.trainer.calls) == {"open"}


async def test_a_holder_without_heartbeats_is_noticed_and_replaced(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    """Its process is dead or frozen: the run waits neither for it nor for its requests."""
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
    assert [entry.lease_epoch for entry in run.ledger] == [2]
    assert run.trainer.count("close") == 2  # the old session is closed, too


async def test_an_attempt_given_up_before_it_began_opens_no_session(
    start_tuned: Start, tunable_farm: Farm, quick_acquisition: None
):
    """The attempt was assigned to a frozen process: if both train on one job, its session would end
    that of its successor."""

    class Hesitant(ScriptedTrainer):
        async def open(self) -> ScriptedTrainer:
            if self.count("open"):
                self.hold("open")
            return await super().open()

    async def open_another(ref: LeaseRef, config: RunConfig) -> ScriptedTrainer:
        raise AssertionError("a second session")

    trainer = Hesitant()
    trainer.fail_once("open", TrainerUnavailableError("nothing answers"))
    run = await start_tuned(Script(trainer=trainer), rows=1)
    await trainer.reached("open", times=2)

    client = tunable_farm.client
    lease = await client.get_workflow_handle(f"{run.id}/lease-1").describe()
    (second,) = lease.raw_description.pending_activities
    environment = ActivityEnvironment()
    environment.info = dataclasses.replace(
        environment.info,
        workflow_id=lease.id,
        workflow_run_id=lease.run_id,
        activity_id=second.activity_id,
        attempt=1,
    )
    elsewhere = TrainerActivities(client, open_another)
    order = LeaseRef(run=run.ref, incarnation=0, lease_epoch=1)
    with pytest.raises(ApplicationError, match="given up before it began"):
        await execute(elsewhere.acquire_lease, order, environment=environment)
    trainer.hold("open").open()
    await run.until(step=1)
    with pytest.raises(ApplicationError, match="given up before it began"):
        await execute(elsewhere.acquire_lease, order, environment=environment)
    await run.result()
    assert [entry.lease_epoch for entry in run.ledger] == [1]


async def test_a_run_waits_for_capacity_at_its_start_too(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recovery, "BACKOFF", (0,))
    monkeypatch.setattr(trainer_lease, "ACQUIRE_ATTEMPTS", RetryPolicy(maximum_attempts=1))
    script = Script()
    script.trainer.fail_once("open", TrainerCapacityError("all trainers are taken"))
    run = await start_tuned(script, rows=1)
    result = await run.result()
    assert (result.steps, run.trainer.count("open")) == (1, 2)


async def test_a_run_that_waits_for_capacity_can_be_stopped(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainer_lease, "ACQUIRE_ATTEMPTS", RetryPolicy(maximum_attempts=1))
    script = Script()
    script.trainer.refuse("open", TrainerCapacityError("all trainers are taken"))
    run = await start_tuned(script, rows=1)
    status = await run.until(phase="waiting for capacity")
    assert "all trainers are taken" in status.waiting_for
    await run.handle.signal("stop")
    result = await run.result()
    assert (result.stopped, result.steps) == (True, 0)
    assert (await run.status()).notes == ["stopped before it began to train"]


async def test_an_exhausted_quota_holds_the_run_whatever_on_fatal_says(start: Start):
    run = await start(Script(), rows=2)
    run.trainer.fail_once("optim_step", QuotaExceededError("add credit"))
    held = await run.until(phase="held")
    assert held.error is not None and "add credit" in held.error
    await run.handle.execute_update("resume")
    result = await run.result()
    assert (result.steps, run.trained) == (2, ["0", "1"])
    assert run.trainer.count("open") == 2


async def test_a_refused_key_fails_the_run(start: Start):
    run = await start(Script(), rows=1)
    run.trainer.fail_once("optim_step", KeyRefusedError("the key in MY_KEY is refused"))
    failure = await run.failure()
    assert failure.type == "KeyRefusedError"
    assert "MY_KEY" in failure.message


async def test_a_key_refused_at_the_start_can_be_fixed_while_the_run_holds(start: Start):
    script = Script()
    script.trainer.fail_once("open", KeyRefusedError("the key in MY_KEY is refused"))
    run = await start(script, rows=1, on_fatal="hold")
    held = await run.until(phase="held")
    assert held.error is not None and "MY_KEY" in held.error
    await run.handle.execute_update("resume")
    assert (await run.result()).steps == 1


async def test_a_sampler_with_wrong_weights_ends_the_run_before_publication(start: Start):
    script = Script()
    script.trainer.served = -1.5
    run = await start(script, rows=1)
    failure = await run.failure()
    assert failure.type == "PublicationMismatchError"
    assert "doesn't serve the trained weights" in failure.message
    assert "differ from the trainer's by 0.5" in failure.message
    assert script.begun == []
