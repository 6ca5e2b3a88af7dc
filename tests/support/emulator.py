"""A running emulator for tests, and helpers for requests to it."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from fireworks.training.sdk import FiretitanServiceClient, types
from safetensors.torch import load_file

from everburn.emulator.http.server import SERVERLESS, UVICORN_OPTIONS, EmulatorSettings, create_app
from everburn.emulator.models.base_model import TINY_SHAPE
from everburn.emulator.service import Emulator
from support.waiting import pauses

POSITIONS = TINY_SHAPE.positions
"""Longest sequence of the tiny base model."""

PATIENCE = 30.0
"""Maximum seconds of a condition on a busy machine."""


@dataclass(frozen=True)
class RunningEmulator:
    url: str
    home: Path
    emulator: Emulator

    @property
    def base_url(self) -> str:
        return self.url + SERVERLESS

    def connect(self) -> FiretitanServiceClient:
        return FiretitanServiceClient(base_url=self.base_url, api_key="fw_local")

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.base_url + path, json=body, timeout=PATIENCE)

    def admin(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response = httpx.request(method, f"{self.url}/emulator/{path}", json=body)
        response.raise_for_status()
        return response.json()

    def mend(self) -> None:
        """Reset faults, scarcity, slowness and worst-case behavior."""
        self.admin("DELETE", "faults")
        for path in ("unknowns", "capacity", "hotload"):
            self.admin("POST", path, {})

    def plan_fault(self, operation: str, kind: str, **details: Any) -> None:
        self.admin("POST", "faults", {"operation": operation, "kind": kind, **details})

    def arrivals(self, operation: str) -> list[float]:
        """Arrival times of an operation's last requests, with any response."""
        seconds: list[float] = self.admin("GET", f"arrivals/{operation}")["seconds"]
        return seconds

    def model_state(self, model_id: str) -> dict[str, Any]:
        """Counts of one model's operations."""
        for session in self.admin("GET", "state")["sessions"].values():
            if model_id in session["models"]:
                return session["models"][model_id]
        raise LookupError(model_id)

    def checkpoint(self, path: str) -> Path:
        """The folder of a checkpoint that save_state returned."""
        return self.home / "checkpoints" / Path(*path.split("/")[1:])

    def saved_weights(self, path: str) -> dict[str, torch.Tensor]:
        return load_file(self.checkpoint(path) / "weights.safetensors")


@contextmanager
def running_emulator(home: Path, port: int = 0, **settings: Any) -> Iterator[RunningEmulator]:
    """An emulator with faults enabled, served by a thread of this process."""
    app = create_app(EmulatorSettings(home=home, enable_faults=True, **settings))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, **UVICORN_OPTIONS, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield RunningEmulator(url, home, app.state.emulator)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    for pause in pauses():
        if condition():
            return
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(pause)


def supervised(tokens: list[int], weights: list[float] | None = None) -> types.Datum:
    """A datum for cross_entropy: predict each next token of a sequence."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": weights or [1.0] * (len(tokens) - 1),
        },
    )


def rollout(tokens: list[int], logprobs: list[float], advantages: list[float]) -> types.Datum:
    """A datum for a policy loss; values belong to tokens[1:]."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": logprobs,
            "advantages": advantages,
        },
    )


def logprobs_of(output: types.ForwardBackwardOutput, index: int = 0) -> list[float]:
    return list(output.loss_fn_outputs[index]["logprobs"].data)


def gradient_through_sdk(
    running: RunningEmulator, trainer: Any, name: str
) -> dict[str, torch.Tensor]:
    """The accumulated gradient, observed as the weight change of one optimizer step.

    With beta1 = beta2 = 0 and eps = learning_rate far above any gradient, Adam's step is
    learning_rate * g / (|g| + eps) = g.
    """
    before = trainer.save_state(f"{name}-before").result().path
    trainer.optim_step(
        types.AdamParams(learning_rate=1e8, eps=1e8, beta1=0.0, beta2=0.0, weight_decay=0.0)
    ).result()
    after = trainer.save_state(f"{name}-after").result().path
    old, new = running.saved_weights(before), running.saved_weights(after)
    return {parameter: old[parameter] - new[parameter] for parameter in old}
