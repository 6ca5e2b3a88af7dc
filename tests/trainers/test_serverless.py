"""A training session through the unmodified SDK, against the emulator."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from everburn.trainers import serverless
from everburn.trainers.protocol import (
    TrainerRejectedError,
    TrainerStateLostError,
    TrainerUnavailableError,
)
from everburn.trainers.serverless import ServerlessTrainer
from support.emulator import RunningEmulator
from support.sessions import ADAM, a_config, a_datum
from support.waiting import until


@pytest.fixture
async def trainer(emulator: RunningEmulator) -> AsyncIterator[ServerlessTrainer]:
    session = await ServerlessTrainer.open(a_config(emulator.base_url))
    yield session
    await session.close()


async def test_a_step_raises_the_logprobs_of_tokens_with_a_positive_advantage(
    trainer: ServerlessTrainer,
) -> None:
    before = await trainer.forward_backward([a_datum()], "importance_sampling", {})
    metrics = await trainer.optim_step(ADAM)
    after = await trainer.forward_backward([a_datum()], "importance_sampling", {})

    assert "loss:sum" in before.metrics
    assert metrics["grad_norm"] > 0
    (old,), (new,) = before.logprobs, after.logprobs
    assert len(old) == 3
    assert sum(new[1:]) > sum(old[1:])


async def test_forward_returns_logprobs_and_changes_nothing(
    emulator: RunningEmulator, trainer: ServerlessTrainer
) -> None:
    before = await trainer.save_checkpoint("before")
    short, long = await trainer.forward([[2, 3], [2, 3, 4, 5]])
    after = await trainer.save_checkpoint("after")
    trained = await trainer.forward_backward([a_datum()], "importance_sampling", {})

    assert (len(short), len(long)) == (1, 3)
    assert short == pytest.approx(long[:1], abs=1e-5)
    assert trained.logprobs == [pytest.approx(long, abs=1e-6)]
    old, same = emulator.saved_weights(before), emulator.saved_weights(after)
    assert all(np.array_equal(old[name], same[name]) for name in old)


async def test_a_published_snapshot_is_opened_by_its_handle(trainer: ServerlessTrainer) -> None:
    from fireworks.training.sdk import FiretitanSamplingClient

    snapshot = await trainer.publish("policy-0000-e1")
    client = FiretitanSamplingClient.from_sampler_handle(snapshot.handle, api_key="fw_local")
    (completion,) = await client.deployment_sampler.sample_with_prompt_tokens(
        [2, 3], max_tokens=3, logprobs=True
    )

    assert "fw_local" not in snapshot.handle
    assert completion.completion_len <= 3


async def test_a_checkpoint_restores_weights_and_optimizer(
    emulator: RunningEmulator, trainer: ServerlessTrainer
) -> None:
    await trainer.forward_backward([a_datum()], "grpo", {})
    await trainer.optim_step(ADAM)
    path = await trainer.save_checkpoint("state-1")
    await trainer.forward_backward([a_datum(-1.0)], "grpo", {})
    await trainer.optim_step(ADAM)
    await trainer.load_checkpoint(path)
    copy = await trainer.save_checkpoint("state-1-copy")

    weights, restored = emulator.saved_weights(path), emulator.saved_weights(copy)
    assert all(np.array_equal(weights[name], restored[name]) for name in weights)


async def test_an_invalid_request_is_refused_and_the_session_continues(
    trainer: ServerlessTrainer,
) -> None:
    with pytest.raises(TrainerRejectedError, match="no checkpoint"):
        await trainer.load_checkpoint("everburn/run-" + "0" * 32 + "/state-7")
    with pytest.raises(TrainerRejectedError, match="clip_lo"):
        await trainer.forward_backward([a_datum()], "ppo", {"clip_lo": 0.8})
    await trainer.forward_backward([a_datum()], "ppo", {})


async def test_an_expired_session_is_lost(
    emulator: RunningEmulator, trainer: ServerlessTrainer
) -> None:
    await trainer.probe()
    emulator.admin("POST", f"expire/{trainer.session}")

    with pytest.raises(TrainerStateLostError):
        await trainer.probe()
    with pytest.raises(TrainerStateLostError):
        await trainer.forward_backward([a_datum()], "grpo", {})


async def test_a_session_is_closed_while_an_operation_is_in_flight(
    emulator: RunningEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serverless, "UNLOAD_TIMEOUT", 0.2)
    session = await ServerlessTrainer.open(a_config(emulator.base_url))
    assert session.session in emulator.admin("GET", "state")["sessions"]
    emulator.plan_fault("retrieve_future", "delay", seconds=2)
    gradients = asyncio.ensure_future(session.forward_backward([a_datum()], "grpo", {}))
    await until(lambda: not emulator.admin("GET", "faults")["faults"])
    await session.close()
    assert session.session not in emulator.admin("GET", "state")["sessions"]
    with pytest.raises(TrainerStateLostError):
        await gradients


async def test_a_session_is_closed_although_the_connection_breaks(
    emulator: RunningEmulator,
) -> None:
    session = await ServerlessTrainer.open(a_config(emulator.base_url))
    emulator.plan_fault(session.session, "drop")
    await session.close()
    assert emulator.admin("GET", "faults") == {"faults": []}
    assert session.session not in emulator.admin("GET", "state")["sessions"]


async def test_closing_does_not_wait_for_a_service_that_does_not_answer(
    emulator: RunningEmulator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that must stop would be killed while waiting. The request continues meanwhile."""
    monkeypatch.setattr(serverless, "CLOSE_TIMEOUT", 0.5)
    session = await ServerlessTrainer.open(a_config(emulator.base_url))
    emulator.plan_fault(session.session, "status", status=503, count=1000)
    await asyncio.wait_for(session.close(), 20)
    assert f"session {session.session} isn't closed yet" in caplog.text
    assert session.session in emulator.admin("GET", "state")["sessions"]
    emulator.admin("DELETE", "faults")
    await until(lambda: session.session not in emulator.admin("GET", "state")["sessions"])


async def test_an_unreachable_service_is_unavailable(dead_url: str) -> None:
    url = f"{dead_url}/training/v1/serverless"
    with pytest.raises(TrainerUnavailableError, match=f"nothing answers at {url}"):
        await ServerlessTrainer.open(a_config(url))


async def test_an_unknown_model_is_rejected(emulator: RunningEmulator) -> None:
    config = a_config(emulator.base_url, base_model="accounts/nobody/models/none")
    with pytest.raises(TrainerRejectedError, match=r"accounts/nobody/models/none.*unknown"):
        await ServerlessTrainer.open(config)


async def test_a_new_adapter_is_initialized_from_its_seed(emulator: RunningEmulator) -> None:
    paths = []
    for seed in (3, 3, 4):
        session = await ServerlessTrainer.open(a_config(emulator.base_url, seed=seed))
        paths.append(await session.save_checkpoint("state-0"))
        await session.close()
    first, second, third = (emulator.saved_weights(path) for path in paths)

    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert any(not np.array_equal(first[name], third[name]) for name in first)


async def test_lost_gradients_are_detected_at_the_update(
    emulator: RunningEmulator, trainer: ServerlessTrainer
) -> None:
    for _ in range(2):
        await trainer.forward_backward([a_datum()], "importance_sampling", {})
    await trainer.optim_step(ADAM)

    await trainer.forward_backward([a_datum()], "importance_sampling", {})
    emulator.plan_fault("forward_backward", "wipe_gradients")
    await trainer.forward_backward([a_datum(), a_datum()], "importance_sampling", {})
    with pytest.raises(TrainerStateLostError, match="made of 2 sequences, and 3 were sent"):
        await trainer.optim_step(ADAM)
