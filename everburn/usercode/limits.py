"""The time limit of user functions on a trainer worker: `loss` and `prepare_batch`.

They run on their own threads, so that one that blocks stops neither the SDK's event loop nor the
worker's. Python can't end a thread, so a function that doesn't return is given up. Owns the limit,
its error, and the loop that replaces a blocked one. Doesn't own the threads (threads.py, loop.py).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from everburn.usercode.entrypoints import worker_name
from everburn.usercode.loop import UserLoop

T = TypeVar("T")

LIMIT = 1800.0
"""Seconds: judges of a whole batch may take minutes. The activity's timeout is longer
(workflows/run/session.py), so the error names the function."""


class UserCodeStuckError(RuntimeError):
    """A user function hasn't returned within LIMIT. It may still run; its result is ignored."""


async def limited(call: Awaitable[T]) -> T:
    """Await a user function. Raises UserCodeStuckError after LIMIT."""
    deadline = asyncio.timeout(LIMIT)
    try:
        async with deadline:
            return await call
    except TimeoutError:
        if not deadline.expired():
            raise  # the function's own
        raise UserCodeStuckError(
            f"it hasn't returned within {LIMIT:g} s. Fix it and restart worker {worker_name()}: "
            "until then its blocked thread remains, which can't be ended"
        ) from None


class LimitedLoop:
    """A user loop on which no call may take longer than LIMIT. If one does, a new loop replaces
    it, because the old one may be blocked forever."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = UserLoop(name)

    async def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await `function()` there. Raises UserCodeStuckError, UserCodeExitError."""
        loop = self._loop
        try:
            return await limited(loop.run(function))
        except UserCodeStuckError:
            if self._loop is loop:
                # Not closed: that would cancel other calls there, if it still runs.
                self._loop = UserLoop(self._name)
            raise

    def close(self) -> None:
        """Cancel the calls there. Doesn't wait for blocked code."""
        self._loop.close()
