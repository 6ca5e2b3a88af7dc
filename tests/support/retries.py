"""The SDK's retries without its waiting."""

import asyncio
from typing import Any

import pytest
from fireworks.training.sdk._core import _base_client
from fireworks.training.sdk._core.lib import api_future_impl, internal_client_holder

HURRY = 50
BEAT = 10
"""Seconds between the SDK's heartbeats; nothing else waits for so long."""


class HastyAsyncio:
    """The `asyncio` module of another module, whose sleeps between attempts are over in a fiftieth
    of the time; heartbeats keep theirs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds if seconds == BEAT else seconds / HURRY)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the SDK try again at once what it tries again after half a second and more, and go on at
    once where it pauses because of a bill. What a service asks it to wait, it waits."""
    for module in (internal_client_holder, api_future_impl):
        monkeypatch.setattr(module, "asyncio", HastyAsyncio())
    for delay in ("INITIAL_RETRY_DELAY", "MAX_RETRY_DELAY"):
        monkeypatch.setattr(_base_client, delay, 0.01)
