"""Threads for blocking code that is awaited from an event loop.

Owns the thread of one call of user code, and the pool of Everburn's own calls. Doesn't own which
code blocks, or for how long it may.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_POOL = ThreadPoolExecutor(32, "everburn")


async def to_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run Everburn's own blocking code, such as a store access, in a pool that user code can't use.

    Unlike asyncio.to_thread, whose few threads user code uses too: code that hangs there occupies
    its thread forever.
    """
    context = copy_context()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_POOL, context.run, function, *arguments)


async def in_thread(function: Callable[[], T]) -> T:
    """Run a blocking function of the user on a new thread.

    Not in a pool: code that hangs would occupy its threads. The thread doesn't keep its process
    alive, and a caller that is cancelled doesn't wait for it.

    Raises:
        RuntimeError: in place of a StopIteration; and whatever else the function raises.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = copy_context()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            method(value)

    def run() -> None:
        try:
            value = context.run(_without_stop_iteration, function)
        except BaseException as error:
            method: Callable[[Any], None] = future.set_exception
            outcome: Any = error
        else:
            method, outcome = future.set_result, value
        with suppress(RuntimeError):  # the loop is closed: there is no caller any more
            loop.call_soon_threadsafe(settle, method, outcome)

    threading.Thread(target=run, name="user code", daemon=True).start()
    return await future


def _without_stop_iteration(function: Callable[[], T]) -> T:
    """Call it. A StopIteration becomes a RuntimeError, as in a coroutine: a future refuses it, and
    before Python 3.12 the caller would wait forever."""
    try:
        return function()
    except StopIteration as error:
        raise RuntimeError(f"it raised {error!r}") from error
