"""HUD environments in this process, each on its own thread and event loop.

An environment that blocks (a grader that computes, a tool that sleeps) delays neither sampling, nor
the worker, nor other environments, which HUD would give up as dead.
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from hud.environment import load_environment
from hud.eval import LocalRuntime, Runtime, Task

from everburn.hud.sources import enter_source
from everburn.usercode.loop import UserLoop
from hud import Environment

THREAD_NAME = "hud environment"


class LocalEnvironments:
    """The environments of a source, served by this process.

    source: a .py file or folder that declares them, or a function that makes one for a task.
    slots: each held until the environment has ended, also one that blocks after its run was
    cancelled. shared: all environments of this process use one loop.
    """

    def __init__(
        self,
        source: Path | Callable[[Task], Environment],
        slots: asyncio.Semaphore,
        shared: bool = False,
    ) -> None:
        self._source = source
        self._slots = slots
        self._permanent_loop: UserLoop | None = None
        if shared:
            self._permanent_loop = _permanent_loop(None)
        elif isinstance(source, Path) and _declares_one_object(source):
            # HUD serves it to one task at a time; its state may belong to its loop.
            self._permanent_loop = _permanent_loop(source)

    @asynccontextmanager
    async def __call__(self, task: Task) -> AsyncIterator[Runtime]:
        session = _Session(self._source, task)
        # Never cancelled: an environment that blocks ends when it can, without its caller.
        ended = asyncio.ensure_future(self._serve(session))
        address = asyncio.wrap_future(session.address)
        try:
            either: set[asyncio.Future[Any]] = {address, ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not address.done():
                await asyncio.shield(ended)  # raises the error of the start
            yield address.result()
        finally:
            session.released.set_result(None)
            await asyncio.shield(ended)

    async def _serve(self, session: "_Session") -> None:
        async with self._slots:
            if session.released.done():
                return  # the caller was cancelled while waiting for the slot
            if self._permanent_loop is not None:
                await self._permanent_loop.run(session.load)
                await self._permanent_loop.run(session.serve)
                return
            new_loop = UserLoop(THREAD_NAME)
            try:
                # On the thread that serves it: a module may create objects of its thread.
                await new_loop.run(session.load)
            except BaseException:
                new_loop.close()
                raise
            with _serving_loop(session, new_loop) as loop:
                await loop.run(session.serve)


class _Session:
    """One environment, from load to stop."""

    environment: Environment

    def __init__(self, source: Path | Callable[[Task], Environment], task: Task) -> None:
        self._source = source
        self._task = task
        self.address: Future[Runtime] = Future()
        self.released: Future[None] = Future()

    async def load(self) -> None:
        if not isinstance(self._source, Path):
            self.environment = self._source(self._task)
            return
        with _loading:
            enter_source(self._source)
            self.environment = load_environment(self._source, name=self._task.env)

    async def serve(self) -> None:
        released = asyncio.wrap_future(self.released)
        serving = asyncio.ensure_future(self._serve_until(released))
        either: set[asyncio.Future[Any]] = {serving, released}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if released.done() and not self.address.done():
            serving.cancel()  # it is still starting
            await asyncio.gather(serving, return_exceptions=True)
        else:
            await serving

    async def _serve_until(self, released: "asyncio.Future[None]") -> None:
        local = LocalRuntime(lambda _: self.environment)
        with _importable(self._source):
            async with local(self._task) as runtime:
                self.address.set_result(runtime)
                await released


_loading = threading.Lock()
"""Imports change process-wide state: one environment loads at a time."""
_loops: dict[Environment, tuple[UserLoop, set[_Session]]] = {}
"""For each Environment object, the loop that serves it and the sessions that use it."""
_loops_lock = threading.Lock()


@contextmanager
def _serving_loop(session: _Session, new_loop: UserLoop) -> Iterator[UserLoop]:
    """The one loop of the session's Environment object: the loop that already serves it, else
    `new_loop`. The last session closes it."""
    with _loops_lock:
        loop, sessions = _loops.setdefault(session.environment, (new_loop, set()))
        sessions.add(session)
    if loop is not new_loop:
        new_loop.close()
    try:
        yield loop
    finally:
        with _loops_lock:
            sessions.remove(session)
            if not sessions:
                del _loops[session.environment]
                loop.close()


@cache
def _permanent_loop(source: Path | None) -> UserLoop:
    """The loop of a source, or of all environments, while this process lives."""
    return UserLoop(THREAD_NAME)


def _declares_one_object(source: Path) -> bool:
    """True if HUD keeps the modules of a source, and thus one Environment object for all tasks."""
    return source.is_dir() or (source.parent / "__init__.py").is_file()


@contextmanager
def _importable(source: object) -> Iterator[None]:
    """Lets templates import the modules next to their file at any time."""
    if not isinstance(source, Path):
        yield
        return
    folder = str(source if source.is_dir() else source.parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)
