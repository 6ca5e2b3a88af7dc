"""The SDK's retries without its delays."""

import asyncio
from typing import Any

import pytest
from fireworks.training.sdk._core import _base_client
from fireworks.training.sdk._core.lib import api_future_impl, internal_client_holder

HURRY = 50
BEAT = 10
"""Seconds between the SDK's heartbeats; all other sleeps are shorter."""


class HastyAsyncio:
    """Replaces `asyncio` in another module: sleeps between attempts take a fiftieth of the time;
    those between heartbeats are unchanged."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds if seconds == BEAT else seconds / HURRY)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the SDK's delays before retries and its pauses for billing. Delays requested by a
    service are unchanged."""
    for module in (internal_client_holder, api_future_impl):
        monkeypatch.setattr(module, "asyncio", HastyAsyncio())
    for delay in ("INITIAL_RETRY_DELAY", "MAX_RETRY_DELAY"):
        monkeypatch.setattr(_base_client, delay, 0.01)
