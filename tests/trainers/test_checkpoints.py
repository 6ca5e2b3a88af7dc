"""Checkpoints and promoted models, which outlive a session, through the SDK and the emulator."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from everburn.trainers.protocol import (
    ModelIdTakenError,
    PromotionError,
    PromotionRefusedError,
    QuotaExceededError,
    TrainerRejectedError,
)
from everburn.trainers.serverless import ServerlessTrainer
from support.emulator import RunningEmulator
from support.sessions import ADAM, a_config, a_datum


@pytest.fixture
async def artifacts(emulator: RunningEmulator) -> AsyncIterator[dict[str, str]]:
    """The checkpoint, snapshot path and promoted model of an ended session."""
    session = await ServerlessTrainer.open(a_config(emulator.base_url))
    await step(session)
    snapshot = await session.publish("policy-0001-e1")
    model_id = f"model-{session.session}"
    artifacts = {
        "checkpoint": await session.save_checkpoint("state-1"),
        "snapshot": snapshot.path,
        "model": await session.promote(snapshot.path, model_id, again=False),
    }
    await session.close()
    yield artifacts


async def step(session: ServerlessTrainer) -> dict[str, float]:
    await session.forward_backward([a_datum()], "importance_sampling", {})
    return await session.optim_step(ADAM)


async def open_session(emulator: RunningEmulator, **changes: Any) -> ServerlessTrainer:
    return await ServerlessTrainer.open(a_config(emulator.base_url, seed=9, **changes))


async def test_a_checkpoint_of_another_session_restores_weights_and_optimizer(
    emulator: RunningEmulator, artifacts: dict[str, str]
) -> None:
    session = await open_session(emulator)
    await session.load_checkpoint(artifacts["checkpoint"])
    copy = await session.save_checkpoint("state-0")
    old, new = emulator.saved_weights(artifacts["checkpoint"]), emulator.saved_weights(copy)
    assert all((old[name] == new[name]).all() for name in old)
    assert (await step(session))["step"] == 2  # Adam continues
    await session.close()


async def test_a_snapshot_cannot_be_loaded_as_a_checkpoint(
    emulator: RunningEmulator, artifacts: dict[str, str]
) -> None:
    session = await open_session(emulator)
    with pytest.raises(TrainerRejectedError, match="Sampler snapshots are not checkpoints"):
        await session.load_checkpoint(artifacts["snapshot"])
    snapshot = await session.publish("policy-0000-e1")
    with pytest.raises(TrainerRejectedError, match="is a sampler snapshot"):
        await session.load_checkpoint(snapshot.path)
    await session.close()


async def test_a_checkpoint_without_optimizer_state_is_refused(
    emulator: RunningEmulator, artifacts: dict[str, str]
) -> None:
    (emulator.checkpoint(artifacts["checkpoint"]) / "optimizer.safetensors").unlink()
    session = await open_session(emulator)
    with pytest.raises(TrainerRejectedError, match="holds no optimizer state"):
        await session.load_checkpoint(artifacts["checkpoint"])
    await session.close()


async def test_a_promoted_adapter_can_be_loaded_by_another_session(
    emulator: RunningEmulator, artifacts: dict[str, str]
) -> None:
    session = await open_session(emulator)
    await session.load_adapter(artifacts["model"])
    copy = await session.save_checkpoint("state-0")
    old, new = emulator.saved_weights(artifacts["checkpoint"]), emulator.saved_weights(copy)
    assert all((old[name] == new[name]).all() for name in old)
    assert (await step(session))["step"] == 1  # Adam starts again
    await session.close()

    other = await open_session(emulator, lora_rank=2)
    with pytest.raises(TrainerRejectedError, match="rank is 4 there and 2 here"):
        await other.load_adapter(artifacts["model"])
    await other.close()


async def test_a_promotion_can_be_retried(emulator: RunningEmulator) -> None:
    session = await open_session(emulator)
    snapshot = await session.publish("policy-0001-e1")
    model_id = f"model-{session.session}"
    # Applied, but its answer is lost.
    emulator.plan_fault("promote", "status", status=400, applied=True, message="lost on the way")
    with pytest.raises(PromotionError, match=r"isn't promoted.*lost on the way"):
        await session.promote(snapshot.path, model_id, again=False)
    name = f"accounts/everburn/models/{model_id}"
    assert await session.promote(snapshot.path, model_id, again=True) == name
    # Another's model of that id isn't taken for the run's.
    with pytest.raises(PromotionError, match="exists already"):
        await session.promote(snapshot.path, model_id, again=False)
    await session.close()


async def test_a_failed_promotion_says_whether_a_model_may_exist(emulator: RunningEmulator) -> None:
    session = await open_session(emulator)
    snapshot = await session.publish("policy-0001-e1")
    model_id = f"model-{session.session}"
    name = f"accounts/everburn/models/{model_id}"
    # Refused: no model was created.
    emulator.plan_fault("promote", "status", status=400)
    with pytest.raises(PromotionRefusedError):
        await session.promote(snapshot.path, model_id, again=False)
    # The account may not promote.
    emulator.plan_fault("promote", "status", status=402)
    with pytest.raises(QuotaExceededError, match="add credit"):
        await session.promote(snapshot.path, model_id, again=False)
    # Unknown.
    for fault in ({"kind": "drop", "applied": True}, {"kind": "malformed"}):
        emulator.plan_fault("promote", **fault)
        with pytest.raises(PromotionError) as caught:
            await session.promote(snapshot.path, f"{model_id}-{fault['kind']}", again=False)
        assert type(caught.value) is PromotionError
    # The SDK repeats the request, and the first one has created the model.
    emulator.plan_fault("promote", "status", status=503, applied=True)
    assert await session.promote(snapshot.path, model_id, again=False) == name
    with pytest.raises(ModelIdTakenError, match=rf"{name} exists already.*output_model_id"):
        await session.promote(snapshot.path, model_id, again=False)
    # The model existed before, and the SDK repeats the request.
    emulator.plan_fault("promote", "status", status=503)
    with pytest.raises(ModelIdTakenError):
        await session.promote(snapshot.path, model_id, again=False)
    await session.close()


async def test_a_snapshot_of_an_ended_session_cannot_be_promoted(
    emulator: RunningEmulator, artifacts: dict[str, str]
) -> None:
    session = await open_session(emulator)
    with pytest.raises(PromotionError, match="its session doesn't list it"):
        await session.promote(artifacts["snapshot"], "too-late", again=False)
    await session.close()
