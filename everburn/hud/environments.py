"""The placement of HUD environments: in this process, in their own processes, or hosted.

Owns the choice, and the limit on concurrent environments. Doesn't own the environments (local.py,
processes.py) or the agents, which run with the rollouts and connect to an environment's socket.
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
from everburn.rollouts.contract import SandboxRegistry
from everburn.usercode.entrypoints import call

Isolation = Literal["thread", "shared", "process"]
MAX_ENVIRONMENTS = 64


class PlacementError(ValueError):
    """The configured placement is invalid."""


def place(
    sandboxes: SandboxRegistry,
    *,
    env_path: str | None = None,
    environment: str | None = None,
    hosted: bool = False,
    isolation: Isolation = "thread",
    max_environments: int = MAX_ENVIRONMENTS,
) -> Provider:
    """The provider of environments. Takes exactly one of env_path, environment and hosted.

    env_path: a .py file or folder that declares the environment, loaded again for each task.
    environment: `module:function` that returns a new one. hosted: on the HUD platform.
    isolation: "thread": each local environment has its own thread and event loop. "shared": all use
    one loop, for modules that keep objects of a loop (a client, a semaphore). "process": each has
    its own process, registered with `sandboxes`, which takes seconds to start: for graders that
    compute for long or change process-wide state.
    max_environments: limit on concurrent environments.

    Raises:
        PlacementError: not exactly one of the three, no such file, or invalid isolation.
        HudKeyMissingError: hosted without a key.
        EntrypointError: `environment` can't be resolved.
    """
    if [env_path is not None, environment is not None, hosted].count(True) != 1:
        raise PlacementError("set exactly one of env_path, environment and hosted")
    if isolation not in ("thread", "shared", "process"):
        raise PlacementError(
            f"isolation is {isolation!r}; it must be 'thread', 'shared' or 'process'"
        )
    if isolation == "process" and env_path is None:
        raise PlacementError("isolation 'process' requires env_path")
    if max_environments < 1:
        raise PlacementError(f"max_environments is {max_environments}; it must be at least 1")
    slots = asyncio.Semaphore(max_environments)
    shared = isolation == "shared"
    if hosted:
        require_hud_key("a hosted environment")
        return LimitedProvider(HUDRuntime(), slots)
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
        return LimitedProvider(ProcessEnvironments(path, sandboxes), slots)
    return LocalEnvironments(path, slots, shared)


class LimitedProvider:
    """Limits the concurrent environments of another provider."""

    def __init__(self, provider: Provider, slots: asyncio.Semaphore) -> None:
        self._provider = provider
        self._slots = slots

    @asynccontextmanager
    async def __call__(self, task: Task) -> AsyncIterator[Runtime]:
        async with self._slots, self._provider(task) as runtime:
            yield runtime
