"""Opening: the wait for a session, which costs from the moment that it is there.

Owns what becomes of one that comes too late, or for nobody: it is closed. Doesn't own how a session
is opened (serverless.py, dedicated.py) or how often that is tried (workflows/).
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from everburn.trainers import Trainer

T = TypeVar("T", bound=Trainer)


async def opened(opening: Awaitable[T], seconds: float | None = None) -> T:
    """The session that `opening` comes to. It goes on when it takes longer, or its caller is
    cancelled, as what a thread does would anyway; its session is closed then.

    Raises:
        TimeoutError: there was none within `seconds`; and whatever `opening` raises.
    """
    task = asyncio.ensure_future(opening)
    try:
        await asyncio.wait([task], timeout=seconds)
    except asyncio.CancelledError:
        task.add_done_callback(_close)
        raise
    if not task.done():
        task.add_done_callback(_close)
        raise TimeoutError
    return task.result()


def _close(task: "asyncio.Future[T]") -> None:
    if not task.cancelled() and task.exception() is None:
        closing = asyncio.ensure_future(task.result().close())
        _closings.add(closing)
        closing.add_done_callback(_closings.discard)


_closings: set["asyncio.Future[None]"] = set()
"""The loop holds tasks weakly."""
