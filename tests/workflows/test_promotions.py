"""The promotion of the final policy to a model: once, or with a reason why not."""

import pytest

from everburn.trainers.protocol import (
    ModelIdTakenError,
    PromotionError,
    PromotionRefusedError,
    TrainerStateLostError,
)
from support.farm import Start
from support.script import Script
from workflows.run import recovery

PROMOTION = "promote policy-0001-e1 my-model"


async def test_the_final_policy_is_promoted_while_its_session_is_open(start: Start):
    run = await start(Script(), rows=2, output_model_id="my-model")
    result = await run.result()
    assert result.model == "accounts/scripted/models/my-model"
    assert run.trainer.calls[-2:] == ["promote policy-0002-e1 my-model", "close"]


@pytest.mark.parametrize(
    ("failure", "next_call"),
    [
        pytest.param(PromotionError("503"), f"{PROMOTION} again", id="maybe applied"),
        pytest.param(PromotionRefusedError("400"), PROMOTION, id="refused"),
    ],
)
async def test_a_failed_promotion_is_retried(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch, failure: PromotionError, next_call: str
):
    """A model that exists by then is the run's own only if the first attempt may have made it."""
    monkeypatch.setattr(recovery, "BACKOFF", (0,))
    script = Script()
    script.trainer.fail_once("promote", failure)
    run = await start_tuned(script, rows=1, output_model_id="my-model")
    result = await run.result()
    assert result.model == "accounts/scripted/models/my-model"
    assert run.trainer.calls[-3:] == [PROMOTION, next_call, "close"]


async def test_a_model_id_that_is_taken_is_tried_once(start: Start):
    script = Script()
    script.trainer.refuse("promote", ModelIdTakenError("model my-model exists already"))
    run = await start(script, rows=1, output_model_id="my-model")
    failure = await run.failure()
    assert failure.type == "PromotionFailed"
    assert "exists already" in failure.message
    assert "--set output_model_id=ID" in failure.message
    assert run.trainer.count("promote") == 1


async def test_a_run_whose_promotion_fails_can_be_resumed(
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


async def test_a_promotion_whose_session_is_lost_continues_in_the_next(start: Start):
    script = Script()
    script.trainer.fail_once("promote", TrainerStateLostError("the session expired"))
    run = await start(script, rows=1, output_model_id="my-model")
    result = await run.result()
    assert result.model == "accounts/scripted/models/my-model"
    assert run.trainer.calls[-2] == "promote policy-0001-e2 my-model again"
