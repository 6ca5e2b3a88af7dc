"""What a run starts from and what it leaves: checkpoints, adapters, a promoted model."""

import pytest

from everburn.checkpoints import find_checkpoint
from everburn.trainers import (
    ModelIdTakenError,
    PromotionError,
    PromotionRefusedError,
    TrainerRejectedError,
    TrainerStateLostError,
)
from support.farm import Start
from support.script import Script
from workflows import recovery

ELSEWHERE = "acme/run-" + "0123456789abcdef" * 2 + "/state-7"


async def test_another_runs_checkpoint_is_loaded_before_anything_is_saved(start: Start):
    run = await start(Script(), rows=2, init_from_checkpoint=ELSEWHERE)
    result = await run.result()
    assert run.trainer.calls[:4] == [
        "open",
        f"load_checkpoint {ELSEWHERE}",
        "save_checkpoint state-0",
        "publish policy-0000-e1",
    ]
    # Weights and optimizer are the other run's; steps and rows begin anew.
    assert (result.steps, run.trained) == (2, ["0", "1"])


async def test_a_lease_lost_before_the_first_state_is_saved_loads_the_origin_again(start: Start):
    script = Script()
    script.trainer.fail_once("save_checkpoint state-0", TrainerStateLostError("gone"))
    run = await start(script, rows=1, init_from_checkpoint="cross_job://job-1/step-4")
    await run.result()
    assert run.trainer.count("load_checkpoint cross_job://job-1/step-4") == 2


async def test_a_checkpoint_that_the_trainer_refuses_ends_the_run_with_its_reason(start: Start):
    script = Script()
    script.trainer.refuse(
        "load_checkpoint", TrainerRejectedError("checkpoint x holds no optimizer state")
    )
    run = await start(script, rows=1, init_from_checkpoint=ELSEWHERE)
    failure = await run.failure()
    assert failure.type == "OriginRefused"
    assert "init_from_checkpoint can't be used" in failure.message
    assert "holds no optimizer state" in failure.message
    assert run.trainer.count("save_checkpoint") == 0
    assert run.script.begun == []


async def test_a_bare_name_in_a_new_run_is_refused_before_anything_is_opened(start: Start):
    run = await start(Script(), rows=1, init_from_checkpoint="state-4")
    failure = await run.failure()
    assert failure.type == "InvalidConfig"
    assert "everburn resume RUN --set init_from_checkpoint=state-4" in failure.message
    assert run.trainer.calls == []


async def test_an_adapter_is_loaded_with_a_fresh_optimizer(start: Start):
    adapter = "accounts/acme/models/warm"
    run = await start(Script(), rows=1, lora_rank=4, warm_start_from_adapter=adapter)
    await run.result()
    assert run.trainer.calls[1:3] == [f"load_adapter {adapter}", "save_checkpoint state-0"]


async def test_every_checkpoint_is_told_with_its_full_path_and_recorded(start: Start):
    run = await start(Script(), rows=3, dcp_save_interval=2)
    await run.result()
    status = await run.status()
    assert status.saved == [
        "step 0: scripted/state-0",
        "step 2: scripted/state-2",
        "step 3: scripted/state-3",
    ]
    assert run.ledger[1].checkpoint == "scripted/state-2"
    final = find_checkpoint(run.store, 3)
    assert final is not None and final.path == "scripted/state-3"


async def test_a_final_state_that_is_refused_is_tried_again_under_another_name(start: Start):
    script = Script()
    script.trainer.fail_once("save_checkpoint state-1", TrainerRejectedError("the disk is full"))
    run = await start(script, rows=1)
    result = await run.result()
    assert result.checkpoint == "scripted/state-1-try-2"


async def test_a_final_state_that_cannot_be_saved_fails_the_run_and_says_what_is_left(start: Start):
    script = Script()
    script.trainer.refuse("save_checkpoint state-1", TrainerRejectedError("the disk is full"))
    run = await start(script, rows=1)
    failure = await run.failure()
    assert failure.type == "CheckpointFailed"
    assert "the disk is full" in failure.message and "everburn resume" in failure.message
    assert [entry.step for entry in run.ledger] == [1]


async def test_the_final_policy_is_promoted_while_its_session_lives(start: Start):
    run = await start(Script(), rows=2, output_model_id="my-model")
    result = await run.result()
    assert result.model == "accounts/scripted/models/my-model"
    assert run.trainer.calls[-2:] == ["promote policy-0002-e1 my-model", "close"]


async def test_a_failed_promotion_is_tried_again(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recovery, "BACKOFF", (0,))
    script = Script()
    script.trainer.fail_once("promote", PromotionError("503"))
    run = await start_tuned(script, rows=1, output_model_id="my-model")
    result = await run.result()
    assert result.model == "accounts/scripted/models/my-model"
    # The first may have been applied unseen.
    assert run.trainer.calls[-2] == "promote policy-0001-e1 my-model again"


async def test_a_refused_promotion_has_made_no_model(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    """One that is there at the next attempt is somebody else's."""
    monkeypatch.setattr(recovery, "BACKOFF", (0,))
    script = Script()
    script.trainer.fail_once("promote", PromotionRefusedError("400"))
    run = await start_tuned(script, rows=1, output_model_id="my-model")
    await run.result()
    assert run.trainer.calls[-3:] == 2 * ["promote policy-0001-e1 my-model"] + ["close"]


async def test_an_id_that_is_taken_is_asked_for_once(start: Start):
    script = Script()
    script.trainer.refuse("promote", ModelIdTakenError("model my-model exists already"))
    run = await start(script, rows=1, output_model_id="my-model")
    failure = await run.failure()
    assert failure.type == "PromotionFailed"
    assert "exists already" in failure.message
    assert "--set output_model_id=ID" in failure.message
    assert run.trainer.count("promote") == 1


async def test_a_promotion_that_fails_for_good_leaves_a_run_that_can_be_resumed(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recovery, "BACKOFF", (0,))
    script = Script()
    script.trainer.refuse("promote", PromotionError("model my-model exists already"))
    run = await start_tuned(script, rows=1, output_model_id="my-model")
    failure = await run.failure()
    assert failure.type == "PromotionFailed"
    assert "exists already" in failure.message and "everburn resume" in failure.message
    assert (await run.status()).checkpoint == "scripted/state-1"
    assert run.trainer.calls[-1] == "close"


async def test_a_promotion_whose_session_is_lost_goes_on_in_the_next(start: Start):
    script = Script()
    script.trainer.fail_once("promote", TrainerStateLostError("the session expired"))
    run = await start(script, rows=1, output_model_id="my-model")
    result = await run.result()
    assert result.model == "accounts/scripted/models/my-model"
    assert run.trainer.calls[-2] == "promote policy-0001-e2 my-model again"
