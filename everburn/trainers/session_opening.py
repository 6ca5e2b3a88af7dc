"""Waiting for a session to open; an open session costs money.

Owns that concurrent callers share one opening, and that a session without a waiting caller is
closed. Doesn't own how a session is opened (serverless.py, dedicated.py) or retries (workflows/).
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
    """Openings in progress, by key."""

    _openings: dict[K, _Opening[R]] = field(default_factory=dict)

    async def join(self, key: K, begin: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """The result of the opening for `key`, begun if there is none. It is cancelled when its
        last waiting caller is cancelled."""
        opening = self._openings.get(key)
        if opening is None:
            opening = self._openings[key] = _Opening(asyncio.create_task(begin()))
        opening.waiting += 1
        try:
            return await asyncio.shield(opening.task)
        finally:
            opening.waiting -= 1
            if opening.waiting == 0:
                # Removed first, so that no new caller joins a cancelled opening.
                del self._openings[key]
                opening.task.cancel()

    async def cancel(self) -> None:
        """Cancel all openings, and return when they have ended."""
        tasks = [opening.task for opening in self._openings.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_for_session(opening: Awaitable[T], seconds: float | None = None) -> T:
    """The session that `opening` returns. On a timeout or a cancellation the opening continues, as
    its thread can't be stopped, and its session is then closed.

    Raises:
        TimeoutError: there was none within `seconds`. Also the errors of `opening`.
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
"""The event loop has only weak references to tasks."""
