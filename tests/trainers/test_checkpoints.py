"""What outlives a session: checkpoints and promoted models, through the SDK and the emulator."""

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
async def ended(emulator: RunningEmulator) -> AsyncIterator[dict[str, str]]:
    """What a session has left: a checkpoint, a snapshot's path, a promoted model."""
    session = await ServerlessTrainer.open(a_config(emulator.base_url))
    await step(session)
    snapshot = await session.publish("policy-0001-e1")
    model_id = f"model-{session.session}"
    left = {
        "checkpoint": await session.save_checkpoint("state-1"),
        "snapshot": snapshot.path,
        "model": await session.promote(snapshot.path, model_id, again=False),
    }
    await session.close()
    yield left


async def step(session: ServerlessTrainer) -> dict[str, float]:
    await session.forward_backward([a_datum()], "importance_sampling", {})
    return await session.optim_step(ADAM)


async def opened(emulator: RunningEmulator, **changes: Any) -> ServerlessTrainer:
    return await ServerlessTrainer.open(a_config(emulator.base_url, seed=9, **changes))


async def test_another_sessions_checkpoint_brings_weights_and_optimizer(
    emulator: RunningEmulator, ended: dict[str, str]
) -> None:
    session = await opened(emulator)
    await session.load_checkpoint(ended["checkpoint"])
    again = await session.save_checkpoint("state-0")
    old, new = emulator.saved_weights(ended["checkpoint"]), emulator.saved_weights(again)
    assert all((old[name] == new[name]).all() for name in old)
    assert (await step(session))["step"] == 2  # Adam goes on where it was
    await session.close()


async def test_a_snapshot_is_refused_where_a_checkpoint_is_wanted(
    emulator: RunningEmulator, ended: dict[str, str]
) -> None:
    session = await opened(emulator)
    with pytest.raises(TrainerRejectedError, match="Sampler snapshots are not checkpoints"):
        await session.load_checkpoint(ended["snapshot"])
    own = await session.publish("policy-0000-e1")
    with pytest.raises(TrainerRejectedError, match="is a sampler snapshot"):
        await session.load_checkpoint(own.path)
    await session.close()


async def test_a_checkpoint_without_optimizer_is_refused_not_loaded_with_a_fresh_one(
    emulator: RunningEmulator, ended: dict[str, str]
) -> None:
    (emulator.checkpoint(ended["checkpoint"]) / "optimizer.safetensors").unlink()
    session = await opened(emulator)
    with pytest.raises(TrainerRejectedError, match="holds no optimizer state"):
        await session.load_checkpoint(ended["checkpoint"])
    await session.close()


async def test_a_promoted_adapter_warms_another_session(
    emulator: RunningEmulator, ended: dict[str, str]
) -> None:
    session = await opened(emulator)
    await session.load_adapter(ended["model"])
    again = await session.save_checkpoint("state-0")
    old, new = emulator.saved_weights(ended["checkpoint"]), emulator.saved_weights(again)
    assert all((old[name] == new[name]).all() for name in old)
    assert (await step(session))["step"] == 1  # Adam begins anew
    await session.close()

    other = await opened(emulator, lora_rank=2)
    with pytest.raises(TrainerRejectedError, match="rank is 4 there and 2 here"):
        await other.load_adapter(ended["model"])
    await other.close()


async def test_a_promotion_can_be_tried_again(emulator: RunningEmulator) -> None:
    session = await opened(emulator)
    snapshot = await session.publish("policy-0001-e1")
    model_id = f"model-{session.session}"
    # Applied, and its answer lost.
    emulator.plan_fault("promote", "status", status=400, applied=True, message="lost on the way")
    with pytest.raises(PromotionError, match=r"isn't promoted.*lost on the way"):
        await session.promote(snapshot.path, model_id, again=False)
    name = f"accounts/everburn/models/{model_id}"
    assert await session.promote(snapshot.path, model_id, again=True) == name
    # Somebody else's model of that id isn't taken for the run's own.
    with pytest.raises(PromotionError, match="exists already"):
        await session.promote(snapshot.path, model_id, again=False)
    await session.close()


async def test_what_is_known_of_a_failed_promotion(emulator: RunningEmulator) -> None:
    session = await opened(emulator)
    snapshot = await session.publish("policy-0001-e1")
    model_id = f"model-{session.session}"
    name = f"accounts/everburn/models/{model_id}"
    # Refused: a model that is there next is somebody else's.
    emulator.plan_fault("promote", "status", status=400)
    with pytest.raises(PromotionRefusedError):
        await session.promote(snapshot.path, model_id, again=False)
    # The account may not: as everywhere.
    emulator.plan_fault("promote", "status", status=402)
    with pytest.raises(QuotaExceededError, match="add credit"):
        await session.promote(snapshot.path, model_id, again=False)
    # Nobody knows.
    for fault in ({"kind": "drop", "applied": True}, {"kind": "malformed"}):
        emulator.plan_fault("promote", **fault)
        with pytest.raises(PromotionError) as caught:
            await session.promote(snapshot.path, f"{model_id}-{fault['kind']}", again=False)
        assert type(caught.value) is PromotionError
    # The SDK itself sends it again, and finds what the first has made.
    emulator.plan_fault("promote", "status", status=503, applied=True)
    assert await session.promote(snapshot.path, model_id, again=False) == name
    with pytest.raises(ModelIdTakenError, match=rf"{name} exists already.*output_model_id"):
        await session.promote(snapshot.path, model_id, again=False)
    # Taken all along, and the SDK sends it again for another reason.
    emulator.plan_fault("promote", "status", status=503)
    with pytest.raises(ModelIdTakenError):
        await session.promote(snapshot.path, model_id, again=False)
    await session.close()


async def test_a_snapshot_of_an_ended_session_cannot_be_promoted(
    emulator: RunningEmulator, ended: dict[str, str]
) -> None:
    session = await opened(emulator)
    with pytest.raises(PromotionError, match="its session doesn't list it"):
        await session.promote(ended["snapshot"], "too-late", again=False)
    await session.close()
