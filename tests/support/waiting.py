"""Waiting for a condition without a fixed delay."""

import asyncio
import concurrent.futures
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator

PATIENCE = 30.0
"""Maximum seconds to wait for a condition."""


class Gate:
    """Closed until it is opened, once; waiters may be on any thread's event loop."""

    def __init__(self) -> None:
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()

    def open(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)

    async def passed(self) -> None:
        # Shielded: a cancelled waiter must not cancel the gate for the others.
        await asyncio.shield(asyncio.wrap_future(self._opened))


async def until(
    condition: Callable[[], bool | Awaitable[bool]],
    what: Callable[[], object] = lambda: "",
    patience: float = PATIENCE,
) -> None:
    """Wait until the condition holds; `what` describes the state for the error after `patience`."""
    deadline = time.monotonic() + patience
    for pause in pauses():
        holds = condition()
        if await holds if inspect.isawaitable(holds) else holds:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {patience:g} s in vain: {what()}")
        await asyncio.sleep(pause)


def pauses() -> Iterator[float]:
    """Growing seconds between two checks: a check may be a request to a busy server, and a pause
    matters less the longer the wait."""
    pause = 0.01
    while True:
        yield pause
        pause = min(1.2 * pause, 0.2)
