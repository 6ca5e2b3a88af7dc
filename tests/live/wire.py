"""Shared by live tests: a datum, an optimizer step, and requests that don't use the SDK."""

import asyncio
import time
from typing import Any

import httpx

from everburn.learning.datums import Datum, build_datum
from everburn.records.ledger import AdamParams
from everburn.rollouts.contract import RolloutSample

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


class Wire:
    """Requests that bypass the SDK, for a model that the SDK hasn't used yet."""

    def __init__(self, base_url: str, key: str, model_id: str) -> None:
        self._url = f"{base_url}/api/v1"
        self._headers = {"X-API-Key": key}
        self._model = model_id

    async def submit_gradient(self, seq_id: int) -> str:
        """A forward_backward of one datum; returns its request id."""
        inputs, targets = TOKENS[:-1], TOKENS[1:]
        size = len(targets)
        datum = {
            "model_input": {"chunks": [{"tokens": inputs, "type": "encoded_text"}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": targets, "dtype": "int64", "shape": [size]},
                "weights": {"data": [1.0] * size, "dtype": "float32", "shape": [size]},
            },
        }
        request = {"data": [datum], "loss_fn": "cross_entropy"}
        return await self.submit("forward_backward", seq_id, forward_backward_input=request)

    async def submit_step(self, seq_id: int) -> str:
        """An optimizer step that reports the gradient's norm and doesn't change weights."""
        return await self.submit(
            "optim_step",
            seq_id,
            adam_params={"learning_rate": 0.0},
            grad_accumulation_normalization="none",
        )

    async def one_and_two_submissions(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The results of optimizer steps on a gradient that was submitted once, and on one that was
        submitted twice under one seq_id; and the request ids of the latter."""
        steps: list[dict[str, Any]] = []
        requests: list[str] = []
        for submissions, seq_id in ((1, 1), (2, 3)):
            requests = [await self.submit_gradient(seq_id) for _ in range(submissions)]
            for each in requests:
                await self.result(each)
            stepped = await self.result(await self.submit_step(seq_id + 1))
            assert "error" not in stepped, stepped
            steps.append(stepped.get("metrics", {}))
        return steps, requests

    async def submit(self, operation: str, seq_id: int, **fields: Any) -> str:
        """Raises httpx.HTTPStatusError if the request is refused at once."""
        body = fields | {"model_id": self._model, "seq_id": seq_id}
        return str((await self._post(operation, body))["request_id"])

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
