"""A second event loop, on a thread of its own, for user code.

Rollout functions may block: a grader that computes for seconds must not stop the worker's own
loop, on which heartbeats are sent and tasks polled. Owns the thread and the way in and out of it.
Doesn't own what runs there.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class UserCodeExitError(RuntimeError):
    """User code called sys.exit or was interrupted; the worker goes on."""


class UserLoop:
    """Runs coroutines on its own thread; callers await them from theirs."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await `function()` on the user loop. Cancelling the caller cancels it there.

        Raises:
            UserCodeExitError: in place of SystemExit and KeyboardInterrupt, which would end the
                loop for everybody.
        """
        future = asyncio.run_coroutine_threadsafe(_contained(function), self._loop)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Stop the loop; what still runs on it is cancelled. Doesn't wait for blocked code."""
        self._loop.call_soon_threadsafe(self._cancel_all)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while self._fell_over():
            pass
        self._loop.close()

    def _fell_over(self) -> bool:
        """Run until the loop is stopped, or until a task that user code has made exits: that
        ends the task, and must not end the others."""
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            log.warning("user code raised %s in a task of its own", type(error).__name__)
            return True
        return False

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.create_task(self._stop_after(tasks))

    async def _stop_after(self, tasks: set["asyncio.Task[object]"]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()


async def _contained(function: Callable[[], Awaitable[T]]) -> T:
    try:
        return await function()
    except (SystemExit, KeyboardInterrupt) as error:
        raise UserCodeExitError(f"user code raised {type(error).__name__}: {error}") from error
