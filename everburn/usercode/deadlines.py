"""Timeouts and cancellation of user code on an event loop, with errors that explain themselves.

asyncio's TimeoutError has no text, and a CancelledError that user code raises by itself can't be
told from one that the caller requested. Doesn't own code that blocks (loop.py, threads.py), or how
long anything may take.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class SelfCancelledError(RuntimeError):
    """User code raised CancelledError without being cancelled."""


@asynccontextmanager
async def user_timeout(seconds: float | None, setting: str = "") -> AsyncIterator[None]:
    """Cancel the block after so many seconds; never if None. setting: the name of the limit in
    the configuration.

    Raises:
        TimeoutError: the block took longer.
        SelfCancelledError: the block raised CancelledError without being cancelled, for example
            because it awaited a task that it had cancelled itself.
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
                    "it raised CancelledError without being cancelled: does it await a task that "
                    "it has cancelled itself?"
                ) from error
    except TimeoutError as error:
        if not clock.expired():
            raise  # the block's own
        limit = f"{setting} ({seconds:g} s)" if setting else f"{seconds:g} s"
        raise TimeoutError(f"not finished within {limit}") from error


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` until it has ended, even if the caller is cancelled meanwhile, any number of
    times: the cancellation follows afterwards."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # read, so that asyncio doesn't log it as never retrieved
        raise cancelled
    return task.result()
