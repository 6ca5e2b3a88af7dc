"""One real step on serverless Fireworks, and answers to what only the live service can tell.

The questions are those of docs/fireworks.md. A test fails where Everburn relies on an answer; what
it doesn't rely on is only written down.
"""

import asyncio
import time
from typing import Any

import httpx
import pytest

from everburn.backends import api_key, control_url, training_url
from everburn.config import RunConfig
from everburn.learning.datums import Datum, build_datum
from everburn.ledger import AdamParams
from everburn.rollouts import RolloutSample
from everburn.trainers import TrainerError
from everburn.trainers.agreement import check_served
from everburn.trainers.serverless import ServerlessTrainer

from .conftest import Answer

ADAM = AdamParams(
    learning_rate=1e-4,
    beta1=0.9,
    beta2=0.95,
    eps=1e-12,
    weight_decay=0.0,
    grad_clip_norm=0.0,
    normalization="none",
)
TOKENS = [2, 3, 4, 5, 6, 7, 8, 9]
PATIENCE = 120.0
"""Seconds that a test spends on a question of how long something lasts."""


def a_datum() -> Datum:
    count = len(TOKENS)
    sample = RolloutSample(TOKENS, [-4.0] * count, [0, 0] + [1] * (count - 2), 1.0)
    return build_datum(sample, 1.0)


async def gradient(trainer: ServerlessTrainer) -> None:
    await trainer.forward_backward([a_datum()], "importance_sampling", {})


async def grad_norm(trainer: ServerlessTrainer) -> float | None:
    return (await trainer.optim_step(ADAM)).get("grad_norm")


async def test_one_step_from_gradient_to_served_policy(
    config: RunConfig, trainer: ServerlessTrainer, answer: Answer
) -> None:
    before = await trainer.forward([TOKENS])
    await gradient(trainer)
    metrics = await trainer.optim_step(ADAM)
    after = await trainer.forward([TOKENS])
    assert sum(after[0][2:]) > sum(before[0][2:])
    answer("metrics of optim_step", sorted(metrics))

    snapshot = await trainer.publish("policy-0001-e1")
    gap = await check_served(trainer, snapshot, TOKENS, 2, config.served_tolerance)
    answer("gap between trainer and sampler, in nats", f"{gap:.4f}")

    path = await trainer.save_checkpoint("state-1")
    await trainer.load_checkpoint(path)
    answer("form of a checkpoint's path", path)


@pytest.mark.parametrize("submissions", [1, 2])
async def test_a_repeated_submission_is_applied_once(
    config: RunConfig, trainer: ServerlessTrainer, answer: Answer, submissions: int
) -> None:
    """(a) Retries inside the SDK rely on this. (e) is asked on the way."""
    wire = Wire(config, trainer)
    gradients = {
        "forward_backward_input": {"data": [wire.datum()], "loss_fn": "cross_entropy"},
        "seq_id": 1,
    }
    requests = [await wire.submit("forward_backward", gradients) for _ in range(submissions)]
    await wire.result(requests[0])
    step = {
        "adam_params": {"learning_rate": 0.0},
        "grad_accumulation_normalization": "none",
        "seq_id": 2,
    }
    stepped = await wire.result(await wire.submit("optim_step", step))
    metrics = stepped.get("metrics", {})
    assert "error" not in stepped, stepped
    answer(f"(a) after {submissions} submissions of one seq_id", metrics.get("grad_norm"))
    answer("(a) their request ids", "equal" if len(set(requests)) == 1 else "different")
    again = await wire.result(requests[0])
    answer("(e) a result read again", "readable" if "metrics" in again else again)


class Wire:
    """Requests of a test's own beside the SDK, on a model that the SDK hasn't used yet."""

    def __init__(self, config: RunConfig, trainer: ServerlessTrainer) -> None:
        self._url = f"{training_url(config)}/api/v1"
        self._headers = {"X-API-Key": api_key(config)}
        self._model = trainer._client.model_id

    def datum(self) -> dict[str, Any]:
        inputs, targets = TOKENS[:-1], TOKENS[1:]
        size = len(targets)
        return {
            "model_input": {"chunks": [{"tokens": inputs, "type": "encoded_text"}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": targets, "dtype": "int64", "shape": [size]},
                "weights": {"data": [1.0] * size, "dtype": "float32", "shape": [size]},
            },
        }

    async def submit(self, operation: str, body: dict[str, Any]) -> str:
        reply = await self._post(operation, body | {"model_id": self._model})
        return str(reply["request_id"])

    async def result(self, request_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while True:
            found = await self._post("retrieve_future", {"request_id": request_id})
            if found.get("type") != "try_again" or time.monotonic() > deadline:
                return found
            await asyncio.sleep(1)

    async def _post(self, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        async with httpx.AsyncClient(headers=self._headers, timeout=60) as http:
            reply = await http.post(f"{self._url}/{operation}", json=body)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found


async def test_loading_a_state_clears_gradients(trainer: ServerlessTrainer, answer: Answer) -> None:
    """(c) Everburn loads into new sessions only, and relies on neither answer."""
    path = await trainer.save_checkpoint("state-0")
    await gradient(trainer)
    await trainer.load_checkpoint(path)
    try:
        norm = await grad_norm(trainer)
    except TrainerError as error:
        answer("(c) optim_step after a load", f"refused: {error}")
    else:
        answer("(c) gradient that survives a load", norm)


async def test_a_session_without_heartbeats(config: RunConfig, answer: Answer) -> None:
    """(d) Bounds how long a session of a killed worker blocks its slot."""
    from fireworks.training.sdk.fireworks_client import FireworksClient

    trainer = await ServerlessTrainer.open(config)
    session = trainer.session
    await asyncio.to_thread(trainer._service.close)  # ends the heartbeats, not the session
    began = time.monotonic()
    with FireworksClient(api_key=api_key(config), base_url=control_url(config)) as control:
        name = f"accounts/{control.account_id}/trainingSessions/{session}"
        lived = f"more than {PATIENCE:g} s"
        while time.monotonic() - began < PATIENCE:
            try:
                await asyncio.to_thread(control.list_training_session_checkpoints, name)
            except RuntimeError:
                lived = f"about {time.monotonic() - began:.0f} s"
                break
            await asyncio.sleep(5)
        answer("(d) a session without heartbeats lives", lived)
        try:
            control.delete_training_session(name)
        except RuntimeError as error:
            answer("(d) deleting a session that is gone", str(error).splitlines()[0])


async def test_settings_of_the_other_losses(trainer: ServerlessTrainer, answer: Answer) -> None:
    """(f) The refusal of a key that can't exist may name those that do."""
    for loss in ("dro", "dapo", "gspo", "dppo", "reinforce"):
        try:
            await trainer.forward_backward([a_datum()], loss, {"no_such_setting": 1.0})
        except TrainerError as error:
            answer(f"(f) {loss} with an unknown setting", error)
        else:
            answer(f"(f) {loss} with an unknown setting", "accepted")


async def test_a_checkpoints_name_used_twice(trainer: ServerlessTrainer, answer: Answer) -> None:
    """(g) Everburn uses each name once per session."""
    first = await trainer.save_checkpoint("state-0")
    try:
        second = await trainer.save_checkpoint("state-0")
    except TrainerError as error:
        answer("(g) a name used twice", f"refused: {error}")
    else:
        answer("(g) a name used twice", "the same path" if first == second else second)


async def test_an_adapters_seed(config: RunConfig, answer: Answer) -> None:
    """(h) A fresh adapter changes nothing, so its seed shows only after a step."""
    found = []
    for seed in (7, 7, 8):
        session = await ServerlessTrainer.open(config.model_copy(update={"seed": seed}))
        try:
            await gradient(session)
            await session.optim_step(ADAM)
            found.append((await session.forward([TOKENS]))[0])
        finally:
            await session.close()
    same, other = (max(abs(a - b) for a, b in zip(found[0], x, strict=True)) for x in found[1:])
    answer(
        "(h) largest difference after a step, equal seeds and others", f"{same:.2g}, {other:.2g}"
    )
