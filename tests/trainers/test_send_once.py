"""Requests that may have been applied aren't repeated, through the unmodified SDK."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from everburn.trainers.protocol import TrainerStateLostError
from everburn.trainers.send_once import send_once_client
from everburn.trainers.serverless import ServerlessTrainer
from support.emulator import RunningEmulator
from support.sessions import ADAM, a_config, a_datum
from workers.stack.ports import free_port

pytestmark = pytest.mark.usefixtures("quick_retries")

CHANGES: dict[str, Callable[[ServerlessTrainer, str], Awaitable[Any]]] = {
    "forward_backward": lambda trainer, _: trainer.forward_backward([a_datum()], "grpo", {}),
    "optim_step": lambda trainer, _: trainer.optim_step(ADAM),
    "load_weights": lambda trainer, saved: trainer.load_checkpoint(saved),
    "save_weights": lambda trainer, _: trainer.save_checkpoint("state-1"),
    "save_weights_for_sampler": lambda trainer, _: trainer.publish("policy-0001-e1"),
}


@pytest.fixture
async def trainer(emulator: RunningEmulator) -> AsyncIterator[ServerlessTrainer]:
    """A session of a service that doesn't deduplicate repeated requests."""
    emulator.admin("POST", "unknowns", {"applies_repetitions": True})
    session = await ServerlessTrainer.open(a_config(emulator.base_url))
    yield session
    emulator.admin("DELETE", "faults")
    emulator.admin("POST", "unknowns", {})
    await session.close()


def applied(emulator: RunningEmulator, trainer: ServerlessTrainer) -> dict[str, int]:
    """Counts of the operations that were applied to the model, by name."""
    (model,) = emulator.admin("GET", "state")["sessions"][trainer.session]["models"].values()
    counts: dict[str, int] = model["applied"]
    return counts


async def prepared(trainer: ServerlessTrainer) -> str:
    await trainer.forward_backward([a_datum()], "grpo", {})
    return await trainer.save_checkpoint("state-0")


@pytest.mark.parametrize("effect", [True, False], ids=["applied", "not applied"])
@pytest.mark.parametrize("operation", CHANGES)
async def test_a_connection_that_breaks_after_sending_ends_the_lease(
    emulator: RunningEmulator, trainer: ServerlessTrainer, operation: str, effect: bool
) -> None:
    saved = await prepared(trainer)
    before = applied(emulator, trainer)
    emulator.plan_fault(operation, "drop", applied=effect)
    with pytest.raises(TrainerStateLostError, match="may have been applied, and isn't sent again"):
        await CHANGES[operation](trainer, saved)
    with pytest.raises(TrainerStateLostError):  # later mutations are refused
        await trainer.forward_backward([a_datum()], "grpo", {})
    after = applied(emulator, trainer)
    assert after.pop(operation, 0) == before.pop(operation, 0) + effect
    assert after == before


@pytest.mark.parametrize("status", [408, 500, 502, 504])
async def test_an_answer_after_which_a_request_may_have_been_applied_ends_the_lease(
    emulator: RunningEmulator, trainer: ServerlessTrainer, status: int
) -> None:
    await prepared(trainer)
    emulator.plan_fault("optim_step", "status", status=status, applied=True)
    with pytest.raises(TrainerStateLostError, match=f"was answered by HTTP {status} after it had"):
        await trainer.optim_step(ADAM)
    assert applied(emulator, trainer)["optim_step"] == 1


@pytest.mark.parametrize("status", [409, 429, 503])
async def test_a_refused_request_is_repeated(
    emulator: RunningEmulator, trainer: ServerlessTrainer, status: int
) -> None:
    await prepared(trainer)
    emulator.plan_fault("optim_step", "status", status=status, count=2)
    assert (await trainer.optim_step(ADAM))["step"] == 1
    assert applied(emulator, trainer)["optim_step"] == 1


async def test_a_request_without_effect_is_repeated(
    emulator: RunningEmulator, trainer: ServerlessTrainer
) -> None:
    emulator.plan_fault("forward", "drop", applied=True)
    emulator.plan_fault("get_info", "drop", applied=True)
    (logprobs,) = await trainer.forward([[2, 3, 4]])
    await trainer.probe()
    assert len(logprobs) == 2


async def test_two_equal_requests_are_both_applied(
    emulator: RunningEmulator, trainer: ServerlessTrainer
) -> None:
    for _ in range(2):
        await trainer.forward_backward([a_datum()], "grpo", {})
    await trainer.optim_step(ADAM)
    assert applied(emulator, trainer)["forward_backward"] == 2


async def test_a_request_without_a_connection_is_repeated() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/api/v1/optim_step"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async with send_once_client() as client:
        with pytest.raises(httpx.ConnectError):
            await client.post(url, json={"seq_id": 1})
        async with await asyncio.start_server(answer, "127.0.0.1", port):
            assert (await client.post(url, json={"seq_id": 1})).status_code == 200
