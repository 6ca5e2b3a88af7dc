"""A second event loop, on its own thread, for user code.

Rollout functions may block: a grader that computes for seconds must not stop the worker's main
loop, which sends heartbeats and polls for tasks. A call that never returns can't be ended from
outside, and nothing else can run on its thread. Owns the thread, calls to it, and the detection of
a blocked loop. Doesn't own what runs there, or the reaction to a blocked loop (workers/).
"""

import asyncio
import logging
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

TICK = 1.0
"""Seconds between two ticks of the loop, by which it is known to run."""
GRACE = 10.0
"""Seconds beyond the longest limit of all calls, after which the loop is blocked."""
CLOSE_TIMEOUT = 10.0
"""Seconds that calls have for their cleanup when the loop is closed."""
DEFAULT_LIMIT = 60.0
"""Seconds that the loop may be blocked while no call states a limit of its own."""

log = logging.getLogger(__name__)


class UserCodeExitError(RuntimeError):
    """User code called sys.exit or was interrupted; the worker continues."""


class BlockingError(TimeoutError):
    """The call has blocked the loop for longer than any limit of the calls there."""


class LoopBlockedError(RuntimeError):
    """Other code blocks the loop. The call is not at fault, and must be repeated elsewhere."""


@dataclass(eq=False)
class _Call:
    """A call on the loop. given_up: receives its error once the loop is blocked forever."""

    may_block: float
    given_up: "asyncio.Future[NoReturn]"


_current: ContextVar[_Call] = ContextVar("everburn_user_loop_call")


_resolvers = ThreadPoolExecutor(8, "resolvers")


class _Loop(asyncio.SelectorEventLoop):
    """Resolves host names in a pool of its own: user code may hang in all threads of the loop's
    default pool, and then no connection to a sampler could be opened."""

    async def getaddrinfo(self, *arguments: Any, **hints: Any) -> Any:
        resolve = partial(socket.getaddrinfo, *arguments, **hints)
        return await self.run_in_executor(_resolvers, resolve)


class UserLoop:
    """Runs coroutines on its own thread; callers await them from other loops."""

    def __init__(self, name: str) -> None:
        self._loop = _Loop()
        self._ticks = 0
        self._calls: list[_Call] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        """Tasks of calls, including those that their callers have given up."""
        self._blocked = False
        self._closing = False
        self._longest = 0.0
        """The longest limit of all calls since the last tick."""
        self._loop.call_soon(self._tick)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], Awaitable[T]], may_block: float = 0.0) -> T:
        """Await `function()` on the user loop. Cancelling the caller cancels it there.

        may_block: seconds for which it may block the loop (see `blocked`).

        Raises:
            UserCodeExitError: in place of SystemExit and KeyboardInterrupt, which would end the
                loop.
            BlockingError: the call blocks the loop forever. LoopBlockedError: another call does.
        """
        if self._blocked:
            raise LoopBlockedError("user code blocks this worker, which is about to end")
        call = _Call(may_block, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        self._longest = max(self._longest, may_block)
        work = asyncio.run_coroutine_threadsafe(self._guarded(function, call), self._loop)
        outcome = asyncio.wrap_future(work)
        try:
            await asyncio.wait((outcome, call.given_up), return_when=asyncio.FIRST_COMPLETED)
            return await (outcome if outcome.done() else call.given_up)
        finally:
            self._calls.remove(call)
            if outcome.done():
                # The loop has run since, so a call that has ended doesn't block it.
                self._longest = self._longest_now
            outcome.cancel()

    def call(self, function: Callable[[], None]) -> None:
        """Call the function on the user loop, soon."""
        self._loop.call_soon_threadsafe(function)

    async def blocked(self) -> str:
        """Wait until the loop hasn't run for longer than any call on it may block, plus GRACE.
        Returns the stack of its thread. All calls are given up then; the callers' errors say which
        call blocks, if that is known.

        Time is counted in ticks of the caller's loop, so a pause of the whole process doesn't
        count.
        """
        ticks, idle = self._ticks, 0.0
        while idle <= (self._longest or DEFAULT_LIMIT) + GRACE:
            await asyncio.sleep(TICK)
            if self._ticks == ticks:
                idle += TICK
            else:
                ticks, idle = self._ticks, 0.0
                self._longest = self._longest_now
        assert self._thread.ident is not None
        frame = sys._current_frames()[self._thread.ident]
        self._give_up(_call_of(frame))
        return "".join(traceback.format_stack(frame))

    @property
    def _longest_now(self) -> float:
        return max((call.may_block for call in self._calls), default=0.0)

    def _give_up(self, culprit: _Call | None) -> None:
        self._blocked = True
        if culprit not in self._calls:
            return  # all calls fail with the process, and each counts a little
        for call in self._calls:
            if call is culprit:
                call.given_up.set_exception(BlockingError("it blocks its worker forever"))
            else:
                call.given_up.set_exception(LoopBlockedError("other user code blocks the worker"))

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Stop the loop: its calls are cancelled and have CLOSE_TIMEOUT seconds for their cleanup,
        then other tasks are cancelled, then `last` is called there. Doesn't wait (see `join`).
        Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._stop(last)))

    def join(self, seconds: float) -> bool:
        """Wait for the loop to stop. Returns whether it has: a blocked loop doesn't."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _tick(self) -> None:
        self._ticks += 1
        self._loop.call_later(TICK, self._tick)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while self._interrupted():
            pass
        self._loop.close()

    def _interrupted(self) -> bool:
        """Run until the loop is stopped (False), or until a task of user code exits (True), which
        must not end the others."""
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            log.warning("a task of user code raised %s", type(error).__name__)
            return True
        return False

    async def _guarded(self, function: Callable[[], Awaitable[T]], call: _Call) -> T:
        _current.set(call)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await function()
        except (SystemExit, KeyboardInterrupt) as error:
            raise UserCodeExitError(f"user code raised {type(error).__name__}: {error}") from error
        finally:
            self._tasks.discard(task)

    async def _stop(self, last: Callable[[], None]) -> None:
        calls = set(self._tasks)
        for call in calls:
            if not call.cancelling():  # a second cancellation would interrupt its cleanup
                call.cancel()
        if calls:
            _, late = await asyncio.wait(calls, timeout=CLOSE_TIMEOUT)
            if late:
                log.warning(
                    "%d calls of user code haven't ended within %g s", len(late), CLOSE_TIMEOUT
                )
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            last()
        finally:
            self._loop.stop()


def _call_of(frame: FrameType | None) -> _Call | None:
    """The call for which an event loop's thread runs. Tasks that the call has created inherit its
    context, in which the loop runs their callbacks."""
    while frame is not None:
        if frame.f_code is asyncio.Handle._run.__code__:
            context: Context = frame.f_locals["self"]._context
            return context.get(_current)
        frame = frame.f_back
    return None
