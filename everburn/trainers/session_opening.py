"""Opening: the wait for a session, which costs from the moment that it is there.

Owns what becomes of one that comes too late, or for nobody: it is closed; and that one is opened,
however many wait for it. Doesn't own how a session is opened (serverless.py, dedicated.py) or how
often that is tried (workflows/).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from everburn.trainers.protocol import Trainer

T = TypeVar("T", bound=Trainer)
K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


@dataclass
class _Opening(Generic[R]):
    task: "asyncio.Task[R]"
    waiting: int = 0


@dataclass
class Openings(Generic[K, R]):
    """What is being opened, by what it is for."""

    _openings: dict[K, _Opening[R]] = field(default_factory=dict)

    async def join(self, key: K, begin: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """The outcome of the one opening for `key`, begun unless there is one already. It goes on
        until the last of those who wait for it is cancelled, and then is, too."""
        opening = self._openings.get(key)
        if opening is None:
            opening = self._openings[key] = _Opening(asyncio.create_task(begin()))
        opening.waiting += 1
        try:
            return await asyncio.shield(opening.task)
        finally:
            opening.waiting -= 1
            if opening.waiting == 0:
                # At once: who comes next must not join what is being cancelled.
                del self._openings[key]
                opening.task.cancel()

    async def cancel(self) -> None:
        """Cancel all that there are, and return when they have ended."""
        tasks = [opening.task for opening in self._openings.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
