"""Blocking code beside an event loop.

Owns the thread of one call of user code, and those of Everburn's own. Doesn't own which code
blocks, or for how long it may.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_OWN = ThreadPoolExecutor(32, "everburn")


async def to_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run blocking code of Everburn's own, as a store access, on threads that no user code gets.

    Not by asyncio.to_thread, whose few threads are user code's, too: what hangs there keeps its
    thread for good, also after it was given up.
    """
    context = copy_context()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_OWN, context.run, function, *arguments)


async def in_thread(function: Callable[[], T]) -> T:
    """Run a blocking function on a thread of its own.

    Not on a pool, which has few: code that hangs would hold up everybody else's. The thread
    doesn't keep its process alive, and a caller that is cancelled doesn't wait for it.

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
            value = context.run(_to_be_raised, function)
        except BaseException as error:
            method: Callable[[Any], None] = future.set_exception
            outcome: Any = error
        else:
            method, outcome = future.set_result, value
        with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            loop.call_soon_threadsafe(settle, method, outcome)

    threading.Thread(target=run, name="user code", daemon=True).start()
    return await future


def _to_be_raised(function: Callable[[], T]) -> T:
    """Call it. A StopIteration becomes what a coroutine makes of one: no future takes it, and
    before Python 3.12 the caller would wait for ever."""
    try:
        return function()
    except StopIteration as error:
        raise RuntimeError(f"it raised {error!r}") from error
