"""How long the user's functions may take on a trainer worker: `loss` and `prepare_batch`.

They run on threads of their own, so that one that blocks holds up neither the SDK's event loop,
which all sessions of the process share, nor the worker's, which heartbeats for all its leases. But
Python can't end a thread, so one that doesn't return is given up. Owns the limit, what is said of
a function that exceeds it, and the loop that takes the place of a blocked one. Doesn't own the
threads (threads.py, loop.py), or rollouts, whose limit is their configuration's.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from everburn.usercode.entrypoints import worker_name
from everburn.usercode.loop import UserLoop

T = TypeVar("T")

LIMIT = 1800.0
"""Seconds: judges of a whole batch may take minutes. An activity has longer, a request of an hour
before the function included (workflows/run/session.py): so it's the function that is named."""


class UserCodeStuckError(RuntimeError):
    """A function of the user hasn't returned for LIMIT. It may run on, and nobody waits for it."""


async def limited(call: Awaitable[T]) -> T:
    """What a call of the user's function comes to.

    Raises:
        UserCodeStuckError: nothing, within LIMIT; and whatever the function raises.
    """
    deadline = asyncio.timeout(LIMIT)
    try:
        async with deadline:
            return await call
    except TimeoutError:
        if not deadline.expired():
            raise  # the function's own
        raise UserCodeStuckError(
            f"it hasn't returned within {LIMIT:g} s. Mend it and restart worker {worker_name()}: "
            "a thread that blocks can't be ended, and stays there until then"
        ) from None


class LimitedLoop:
    """A user loop on which nothing may take longer than LIMIT. After something did, another loop
    takes its place: the old one may never turn again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = UserLoop(name)

    async def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await `function()` there.

        Raises:
            UserCodeStuckError, UserCodeExitError, and whatever the function raises.
        """
        loop = self._loop
        try:
            return await limited(loop.run(function))
        except UserCodeStuckError:
            if self._loop is loop:
                # Not closed: that would cancel what else is at work there, if it still turns.
                self._loop = UserLoop(self._name)
            raise

    def close(self) -> None:
        """Cancel what runs there. Doesn't wait for blocked code."""
        self._loop.close()
