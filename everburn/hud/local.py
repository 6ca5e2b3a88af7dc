"""HUD environments in this process, each on a thread of its own.

Owns their loops: an environment that blocks (a grader that computes, a tool that sleeps) holds up
neither sampling, nor the worker, nor another environment, whose agent would take the silence for
its end. Doesn't own the serving (hud's).
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
from weakref import WeakKeyDictionary

from hud.environment import load_environment
from hud.eval import LocalRuntime, Runtime, Task

from everburn.hud.sources import enter_source
from everburn.usercode.loop import UserLoop
from hud import Environment

NAME = "hud environment"
"""Of the threads."""


class LocalEnvironments:
    """The environments of a source, served by this process.

    source: a .py file or folder that declares them, or a function that makes one for a task.
    slots: taken for as long as a thread lives, also by an environment that blocks after everybody
    else has left. shared: all of them on one loop, which outlives them.
    """

    def __init__(
        self,
        source: Path | Callable[[Task], Environment],
        slots: asyncio.Semaphore,
        shared: bool = False,
    ) -> None:
        self._source = source
        self._slots = slots
        self._lasting: UserLoop | None = None
        if shared:
            self._lasting = _lasting_loop(None)
        elif isinstance(source, Path) and _declares_one_object(source):
            # HUD serves it to one task at a time; what it keeps may belong to its loop.
            self._lasting = _lasting_loop(source)

    @asynccontextmanager
    async def __call__(self, task: Task) -> AsyncIterator[Runtime]:
        serving = _Serving(self._source, task)
        # Never cancelled: what blocks ends when it can, and nobody waits for it.
        ended = asyncio.ensure_future(self._serve(serving))
        address = asyncio.wrap_future(serving.address)
        try:
            either: set[asyncio.Future[Any]] = {address, ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not address.done():
                await asyncio.shield(ended)  # raises why it didn't start
            yield address.result()
        finally:
            serving.leave.set_result(None)
            await asyncio.shield(ended)

    async def _serve(self, serving: "_Serving") -> None:
        async with self._slots:
            if serving.leave.done():
                return  # whoever wanted it has waited long enough
            if self._lasting is not None:
                await self._lasting.run(serving.make)
                await self._lasting.run(serving.serve)
                return
            loop = UserLoop(NAME)
            try:
                # On the thread that serves it: some of what a module makes belongs to its thread.
                await loop.run(serving.make)
            except BaseException:
                loop.close()
                raise
            with _homes.at_home(serving.environment, loop) as home:
                await home.run(serving.serve)


class _Serving:
    """One environment from its making to its stop."""

    environment: Environment

    def __init__(self, source: Path | Callable[[Task], Environment], task: Task) -> None:
        self._source = source
        self._task = task
        self.address: Future[Runtime] = Future()
        self.leave: Future[None] = Future()

    async def make(self) -> None:
        if not isinstance(self._source, Path):
            self.environment = self._source(self._task)
            return
        with _loading:
            enter_source(self._source)
            self.environment = load_environment(self._source, name=self._task.env)

    async def serve(self) -> None:
        leave = asyncio.wrap_future(self.leave)
        up = asyncio.ensure_future(self._until(leave))
        either: set[asyncio.Future[Any]] = {up, leave}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if leave.done() and not self.address.done():
            up.cancel()  # it is still starting
            await asyncio.gather(up, return_exceptions=True)
        else:
            await up

    async def _until(self, leave: "asyncio.Future[None]") -> None:
        local = LocalRuntime(lambda _: self.environment)
        with _importable(self._source):
            async with local(self._task) as runtime:
                self.address.set_result(runtime)
                await leave


class _Homes:
    """Where each Environment object is being served: on one loop, whoever asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loops: WeakKeyDictionary[Environment, UserLoop] = WeakKeyDictionary()
        self._guests: WeakKeyDictionary[Environment, int] = WeakKeyDictionary()

    @contextmanager
    def at_home(self, environment: Environment, loop: UserLoop) -> Iterator[UserLoop]:
        """The loop to serve it on: `loop`, or the one where it is being served already. The other
        is closed, and the last who leaves closes this one."""
        with self._lock:
            home = self._loops.setdefault(environment, loop)
            self._guests[environment] = self._guests.get(environment, 0) + 1
        if home is not loop:
            loop.close()
        try:
            yield home
        finally:
            with self._lock:
                self._guests[environment] -= 1
                if not self._guests[environment]:
                    del self._loops[environment], self._guests[environment]
                    home.close()


_homes = _Homes()
_loading = threading.Lock()
"""Importing changes what all of a process share: one environment at a time."""


@cache
def _lasting_loop(source: Path | None) -> UserLoop:
    """Of a source, or of all; for as long as this process lives."""
    return UserLoop(NAME)


def _declares_one_object(source: Path) -> bool:
    """Whether HUD keeps the modules of a source, and with them its environment."""
    return source.is_dir() or (source.parent / "__init__.py").is_file()


@contextmanager
def _importable(source: object) -> Iterator[None]:
    """Templates may import what stands beside their file at any time, as in a process of their
    own."""
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
