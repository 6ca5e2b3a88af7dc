"""Promotion of a snapshot to a model, and training that starts from one, through the SDK."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fireworks.training.sdk import FiretitanServiceClient, RequestFailedError, types
from fireworks.training.sdk.fireworks_client import FireworksClient, ModelDetailsUnavailableError

from everburn.emulator.models.base_model import TINY
from support.emulator import RunningEmulator, supervised

from .test_completions import snapshot


@pytest.fixture
def control(emulator: RunningEmulator) -> Iterator[FireworksClient]:
    with FireworksClient(api_key="fw_local", base_url=emulator.url) as client:
        yield client


def trained_snapshot(
    service: FiretitanServiceClient, trainer: Any, control: FireworksClient
) -> str:
    """The control plane's resource name of a snapshot of a trained model."""
    trainer.forward_backward([supervised([1, 2, 3, 4])], "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
    path = snapshot(trainer, "policy-1")
    assert service.training_session_name is not None
    rows = control.list_training_session_checkpoints(service.training_session_name)
    (row,) = [row for row in rows if row["name"].endswith(path.rpartition("/")[2])]
    assert row["promotable"]
    return str(row["name"])


def test_a_snapshot_becomes_a_model(
    service: FiretitanServiceClient, trainer: Any, control: FireworksClient
) -> None:
    name = trained_snapshot(service, trainer, control)
    model = control.promote_session_checkpoint(name, "my-adder", TINY)
    assert model["name"] == "accounts/everburn/models/my-adder"
    assert (model["state"], model["peftDetails"]["r"]) == ("READY", 4)
    assert control.model_is_moe(model["name"]) is False
    with pytest.raises(RuntimeError, match=r"HTTP 409(.|\n)*exists already"):
        control.promote_session_checkpoint(name, "my-adder", TINY)


def test_invalid_promotions_are_refused_with_the_reason(
    service: FiretitanServiceClient, trainer: Any, control: FireworksClient
) -> None:
    name = trained_snapshot(service, trainer, control)
    with pytest.raises(RuntimeError, match="was trained on"):
        control.promote_session_checkpoint(name, "other-base", "accounts/x/models/y")
    with pytest.raises(RuntimeError, match="has no sampler snapshot"):
        control.promote_session_checkpoint(f"{name}-9", "no-snapshot", TINY)
    with pytest.raises(ModelDetailsUnavailableError) as caught:
        control.model_is_moe("accounts/everburn/models/nobody")
    assert caught.value.status_code == 404


def test_a_promoted_adapter_is_loaded_with_a_fresh_optimizer(
    emulator: RunningEmulator,
    service: FiretitanServiceClient,
    trainer: Any,
    control: FireworksClient,
) -> None:
    promoted = control.promote_session_checkpoint(
        trained_snapshot(service, trainer, control), "a-start", TINY
    )
    other = service.create_lora_training_client(base_model=TINY, rank=4, seed=8, alpha=32)
    other.load_adapter(promoted["name"]).result()
    before = emulator.saved_weights(trainer.save_state("first").result().path)
    after = emulator.saved_weights(other.save_state("second").result().path)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert emulator.model_state(other.model_id)["optimizer_steps"] == 0
    smaller = service.create_lora_training_client(base_model=TINY, rank=2, alpha=32)
    with pytest.raises(RequestFailedError, match="rank is 4 there and 2 here"):
        smaller.load_adapter(promoted["name"]).result()


def test_a_checkpoint_without_its_optimizer_is_refused(
    emulator: RunningEmulator, trainer: Any
) -> None:
    path = trainer.save_state("state").result().path
    (emulator.checkpoint(path) / "optimizer.safetensors").unlink()
    with pytest.raises(RequestFailedError, match="holds no optimizer state"):
        trainer.load_state_with_optimizer(path).result()
