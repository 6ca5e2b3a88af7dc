"""A second event loop, on a thread of its own, for user code.

Rollout functions may block: a grader that computes for seconds must not stop the worker's own
loop, on which heartbeats are sent and tasks polled. One that never returns can't be ended from
outside, and nothing else runs on its thread any more. Owns the thread, the way in and out of it,
and whether it still turns. Doesn't own what runs there, or what a process does that is blocked.
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
"""Seconds between two signs of life."""
GRACE = 10.0
"""Seconds beyond the longest that anything may block."""
ENDING = 10.0
"""Seconds that calls have to clean up after themselves when the loop is closed."""
UNASKED = 60.0
"""Seconds that the loop may be blocked while nothing runs that says how long it may."""

log = logging.getLogger(__name__)


class UserCodeExitError(RuntimeError):
    """User code called sys.exit or was interrupted; the worker goes on."""


class BlockingError(TimeoutError):
    """It has blocked the loop for longer than anything there may take."""


class LoopBlockedError(RuntimeError):
    """Other code blocks the loop: this has no fault in it, and is to be done elsewhere."""


@dataclass(eq=False)
class _Call:
    """Something that runs on the loop. given_up: its error, once the loop is blocked for good."""

    may_block: float
    given_up: "asyncio.Future[NoReturn]"


_current: ContextVar[_Call] = ContextVar("everburn_user_loop_call")


_look_ups = ThreadPoolExecutor(8, "look-ups")


class _Loop(asyncio.SelectorEventLoop):
    """Looks up the names of hosts on threads that nothing else gets: user code may hang in all of
    the loop's own, and no sampler could be connected to any more."""

    async def getaddrinfo(self, *arguments: Any, **hints: Any) -> Any:
        look_up = partial(socket.getaddrinfo, *arguments, **hints)
        return await self.run_in_executor(_look_ups, look_up)


class UserLoop:
    """Runs coroutines on its own thread; callers await them from theirs."""

    def __init__(self, name: str) -> None:
        self._loop = _Loop()
        self._ticks = 0
        self._calls: list[_Call] = []
        self._at_work: set[asyncio.Task[Any]] = set()
        """What runs of them, also once their callers have given them up."""
        self._blocked = False
        self._closing = False
        self._longest = 0.0
        """That any may block which has run since the last sign of life."""
        self._loop.call_soon(self._tick)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], Awaitable[T]], may_block: float = 0.0) -> T:
        """Await `function()` on the user loop. Cancelling the caller cancels it there.

        may_block: seconds for which it may keep the loop to itself (see `blocked`).

        Raises:
            UserCodeExitError: in place of SystemExit and KeyboardInterrupt, which would end the
                loop for everybody.
            BlockingError: it blocks the loop for good. LoopBlockedError: another does.
        """
        if self._blocked:
            raise LoopBlockedError("user code blocks this worker, which is about to end")
        call = _Call(may_block, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        self._longest = max(self._longest, may_block)
        work = asyncio.run_coroutine_threadsafe(self._contained(function, call), self._loop)
        outcome = asyncio.wrap_future(work)
        try:
            await asyncio.wait((outcome, call.given_up), return_when=asyncio.FIRST_COMPLETED)
            return await (outcome if outcome.done() else call.given_up)
        finally:
            self._calls.remove(call)
            if outcome.done():
                # The loop has turned since: what has ended blocks nothing any more.
                self._longest = self._longest_now
            outcome.cancel()

    def call(self, function: Callable[[], None]) -> None:
        """Have it called on the user loop, soon."""
        self._loop.call_soon_threadsafe(function)

    async def blocked(self) -> str:
        """Return once the loop has stood still for longer than anything on it may block, and GRACE:
        where its thread is, as a stack. Everything that runs there is given up then: its callers
        learn whether it was theirs that blocks, where that can be told.

        Time is counted in ticks of the caller's own loop: when the whole process stood still,
        nobody was blocked.
        """
        ticks, still = self._ticks, 0.0
        while still <= (self._longest or UNASKED) + GRACE:
            await asyncio.sleep(TICK)
            if self._ticks == ticks:
                still += TICK
            else:
                ticks, still = self._ticks, 0.0
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
            return  # all of them are lost with the process, and that counts a little for each
        for call in self._calls:
            if call is culprit:
                call.given_up.set_exception(BlockingError("it blocks its worker for good"))
            else:
                call.given_up.set_exception(LoopBlockedError("other user code blocks the worker"))

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Stop the loop: what still runs on it is cancelled, calls first, which have ENDING seconds
        to clean up after themselves; then `last` is called there. Doesn't wait for it (see `join`).
        Once more changes nothing."""
        if self._closing:
            return
        self._closing = True
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._stop(last)))

    def join(self, seconds: float) -> bool:
        """Wait for the loop to stop. Returns whether it has: blocked code never lets it."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _tick(self) -> None:
        self._ticks += 1
        self._loop.call_later(TICK, self._tick)

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

    async def _contained(self, function: Callable[[], Awaitable[T]], call: _Call) -> T:
        _current.set(call)
        task = asyncio.current_task()
        assert task is not None
        self._at_work.add(task)
        try:
            return await function()
        except (SystemExit, KeyboardInterrupt) as error:
            raise UserCodeExitError(f"user code raised {type(error).__name__}: {error}") from error
        finally:
            self._at_work.discard(task)

    async def _stop(self, last: Callable[[], None]) -> None:
        calls = set(self._at_work)
        for call in calls:
            if not call.cancelling():  # else it is ending already: a second time would cut that off
                call.cancel()
        if calls:
            _, late = await asyncio.wait(calls, timeout=ENDING)
            if late:
                log.warning("%d calls of user code haven't ended within %g s", len(late), ENDING)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            last()
        finally:
            self._loop.stop()


def _call_of(frame: FrameType | None) -> _Call | None:
    """The call that a thread of an event loop is at work for, also in tasks which that has made:
    they inherit its context, and the loop runs each callback in its own."""
    while frame is not None:
        if frame.f_code is asyncio.Handle._run.__code__:
            context: Context = frame.f_locals["self"]._context
            return context.get(_current)
        frame = frame.f_back
    return None
