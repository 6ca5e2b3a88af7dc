"""Blocking user code beside an event loop.

Owns the thread of one call. Doesn't own which code blocks, or for how long it may.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Run a blocking function on a thread of its own.

    Not on the shared pool, which has few threads and which the store needs: blocking code would
    hold up everybody's writes. The thread doesn't keep its process alive, and a caller that is
    cancelled doesn't wait for it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = copy_context()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            method(value)

    def run() -> None:
        try:
            value = context.run(function)
        except BaseException as error:
            method: Callable[[Any], None] = future.set_exception
            outcome: Any = error
        else:
            method, outcome = future.set_result, value
        with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            loop.call_soon_threadsafe(settle, method, outcome)

    threading.Thread(target=run, name="user code", daemon=True).start()
    return await future
