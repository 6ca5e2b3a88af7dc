"""Awaiting user code on an event loop, so that what ends it early says why.

A TimeoutError of asyncio has no text, and a CancelledError that nobody has asked for looks like one
that somebody has. Owns what is said in their place. Doesn't own code that blocks (loop.py,
threads.py), or how long anything may take.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class SelfCancelledError(RuntimeError):
    """User code raised CancelledError, and nobody had cancelled it."""


@asynccontextmanager
async def user_timeout(seconds: float | None, limit: str = "") -> AsyncIterator[None]:
    """Cancel the block once it has taken so many seconds; None lets it take its time. limit: what
    they are called where a person sets them.

    Raises:
        TimeoutError: it took longer.
        SelfCancelledError: a cancellation came out of the block that hadn't gone in, as of a task
            that the block had cancelled itself, and awaited.
    """
    try:
        async with asyncio.timeout(seconds) as clock:
            try:
                yield
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise SelfCancelledError(
                    "it raised CancelledError, and nobody had cancelled it: does it await a task "
                    "that it has cancelled itself?"
                ) from error
    except TimeoutError as error:
        if not clock.expired():
            raise  # the block's own
        given = f"{limit} ({seconds:g} s)" if limit else f"{seconds:g} s"
        raise TimeoutError(f"not finished within {given}") from error


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Await it, and don't leave it before it has ended: a caller that is cancelled meanwhile, once
    or more, is so afterwards."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio doesn't log it as forgotten
        raise cancelled
    return task.result()
