"""Where HUD environments run.

Owns the choice of placement, and how many run at once. Doesn't own the environments of this
process (local.py) or in processes of their own (processes.py), nor the agents that talk to them:
those run where rollouts run, and reach an environment over its socket.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from hud.eval import HUDRuntime, Provider, Runtime, Task

from everburn.config import Entrypoint
from everburn.hud.local import LocalEnvironments
from everburn.hud.package import require_hud_key
from everburn.hud.processes import ProcessEnvironments
from everburn.rollouts.contract import ResourceRegistry
from everburn.usercode.entrypoints import call

Isolation = Literal["thread", "shared", "process"]
MAX_ENVIRONMENTS = 64


class PlacementError(ValueError):
    """Environments that aren't where the configuration says."""


def place(
    resources: ResourceRegistry,
    *,
    env_path: str | None = None,
    environment: str | None = None,
    hosted: bool = False,
    isolation: Isolation = "thread",
    max_environments: int = MAX_ENVIRONMENTS,
) -> Provider:
    """Where each task gets its environment; exactly one of the first three.

    env_path: a .py file or folder that declares it, loaded anew for each task. environment:
    `module:function` that returns a new one. hosted: on the HUD platform.
    isolation: each local environment has a thread and an event loop of its own; or "shared", all
    have one loop, for modules that keep what belongs to a loop (a client, a semaphore); or
    "process", each has a process, registered with `resources`, which takes seconds to start: for
    graders that compute for long, or that change what all of a process share.
    max_environments: how many there are at once.

    Raises:
        PlacementError: not exactly one, no such file, or that can't be isolated.
        HudKeyMissingError: hosted, and no key.
        EntrypointError: `environment` can't be resolved.
    """
    if [env_path is not None, environment is not None, hosted].count(True) != 1:
        raise PlacementError("say where HUD environments run: env_path, environment or hosted")
    if isolation not in ("thread", "shared", "process"):
        raise PlacementError(
            f"isolation is {isolation!r}; it must be 'thread', 'shared' or 'process'"
        )
    if isolation == "process" and env_path is None:
        raise PlacementError("isolation 'process' starts an environment from its file: env_path")
    if max_environments < 1:
        raise PlacementError(f"max_environments is {max_environments}; it must be at least 1")
    slots = asyncio.Semaphore(max_environments)
    shared = isolation == "shared"
    if hosted:
        require_hud_key("an environment that is hosted")
        return Limited(HUDRuntime(), slots)
    if environment is not None:
        entrypoint = Entrypoint(name=environment)
        call(entrypoint)
        return LocalEnvironments(lambda task: call(entrypoint), slots, shared)
    path = Path(str(env_path)).resolve()
    if not path.exists():
        raise PlacementError(
            f"there is no HUD environment at {path}; relative paths start at the folder of the "
            "worker processes"
        )
    if isolation == "process":
        return Limited(ProcessEnvironments(path, resources), slots)
    return LocalEnvironments(path, slots, shared)


class Limited:
    """Another placement's environments, so many at once."""

    def __init__(self, placement: Provider, slots: asyncio.Semaphore) -> None:
        self._placement = placement
        self._slots = slots

    @asynccontextmanager
    async def __call__(self, task: Task) -> AsyncIterator[Runtime]:
        async with self._slots, self._placement(task) as runtime:
            yield runtime
