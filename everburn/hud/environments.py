"""Where HUD environments run.

Owns the choice of placement, and the loop of environments in this process. Doesn't own the agents
that talk to them: those run where rollouts run, and reach an environment over its socket.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hud.eval import HUDRuntime, LocalRuntime, Provider, Runtime, SubprocessRuntime, Task

from everburn.config import Entrypoint
from everburn.entrypoints import call
from everburn.hud.package import require_hud_key
from everburn.hud.sources import enter_source
from everburn.user_loop import UserLoop

Isolation = Literal["shared", "process"]


class PlacementError(ValueError):
    """Environments that aren't where the configuration says."""


def place(
    *,
    env_path: str | None = None,
    environment: str | None = None,
    hosted: bool = False,
    isolation: Isolation = "shared",
) -> Provider:
    """Where each task gets its environment; exactly one of the first three.

    env_path: a .py file or folder that declares it, loaded anew for each task. environment:
    `module:function` that returns a new one. hosted: on the HUD platform. isolation: local
    environments share a loop of this process, or get a process each, which takes seconds to
    start: for graders that block for long, or that change what all of a process share.

    Raises:
        PlacementError: not exactly one, no such file, or that can't be isolated.
        HudKeyMissingError: hosted, and no key.
        EntrypointError: `environment` can't be resolved.
    """
    if [env_path is not None, environment is not None, hosted].count(True) != 1:
        raise PlacementError("say where HUD environments run: env_path, environment or hosted")
    if isolation not in ("shared", "process"):
        raise PlacementError(f"isolation is {isolation!r}; it must be 'shared' or 'process'")
    if isolation == "process" and env_path is None:
        raise PlacementError("isolation 'process' starts an environment from its file: env_path")
    if hosted:
        require_hud_key("an environment that is hosted")
        return HUDRuntime()
    if environment is not None:
        entrypoint = Entrypoint(name=environment)
        call(entrypoint)
        return OwnLoop(LocalRuntime(lambda task: call(entrypoint)))
    path = Path(str(env_path)).resolve()
    if not path.exists():
        raise PlacementError(
            f"there is no HUD environment at {path}; relative paths start at the folder of the "
            "worker processes"
        )
    return SubprocessRuntime(path) if isolation == "process" else OwnLoop(LocalRuntime(path), path)


class OwnLoop:
    """Serves local environments from the loop of a thread of their own.

    A grader that blocks then holds up other environments, and neither sampling nor heartbeats.
    """

    def __init__(self, local: LocalRuntime, source: Path | None = None) -> None:
        self._local = local
        self._source = source

    @asynccontextmanager
    async def __call__(self, task: Task) -> AsyncIterator[Runtime]:
        serving = _Serving(self._local, self._source, task)
        ended = asyncio.ensure_future(_environment_loop().run(serving.run))
        address = asyncio.wrap_future(serving.address)
        try:
            either: set[asyncio.Future[Any]] = {address, ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not address.done():
                await ended  # raises why it didn't start
            yield address.result()
        finally:
            if serving.address.done():
                serving.leave.set_result(None)
            else:
                ended.cancel()
            # Whoever is cancelled here leaves its clean-up to end by itself.
            await asyncio.shield(ended)


class _Serving:
    """One environment from start to stop, in one task of the environments' loop."""

    def __init__(self, local: LocalRuntime, source: Path | None, task: Task) -> None:
        self._local = local
        self._source = source
        self._task = task
        self.address: Future[Runtime] = Future()
        self.leave: Future[None] = Future()

    async def run(self) -> None:
        if self._source is not None:
            enter_source(self._source)
        async with self._local(self._task) as runtime:
            self.address.set_result(runtime)
            await asyncio.wrap_future(self.leave)


@lru_cache(maxsize=1)
def _environment_loop() -> UserLoop:
    """Of this process, for as long as it lives."""
    logging.getLogger("asyncio").addFilter(_is_news)
    return UserLoop("hud environments")


def _is_news(record: logging.LogRecord) -> bool:
    """Python 3.11 logs an error for each connection whose handler is cancelled, which is how HUD
    ends every environment."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is not asyncio.CancelledError or "connection_made" not in record.getMessage()
