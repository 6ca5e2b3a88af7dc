"""The user code of runs, loaded once per process and run.

Owns which runs' code stays loaded, and closes the samplers of the code it unloads. The owner of its
folder distinguishes a run from earlier runs of the same id. Doesn't own the activities that use it
(rollouts.py) or the loop it runs on.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

# Unused here. Imported before any thread needs them: transformers has circular imports, and if two
# threads import it at once, one may see a half-initialized module.
from fireworks.training.sdk import FiretitanSamplingClient, FixedConcurrencyController  # noqa: F401
from transformers import AutoTokenizer  # noqa: F401

from activities.contracts import LOAD_TIMEOUT
from everburn.records.ids import RunRef
from everburn.records.run_folder import Owner, find_owner
from everburn.records.store import ArtifactStore
from everburn.rollouts.runner import RolloutRunner
from everburn.usercode.loop import UserLoop

MAX_RUNS = 8
"""Runs whose user code a worker keeps loaded; those in use are kept beyond it."""


@dataclass(eq=False)
class _Loaded:
    task: asyncio.Task[RolloutRunner]
    users: int = 0

    @property
    def runner(self) -> RolloutRunner | None:
        """None while loading, and if loading failed."""
        if not self.task.done() or self.task.cancelled() or self.task.exception() is not None:
            return None
        return self.task.result()


class Runners:
    """The loaded user code by run, in order of last use."""

    def __init__(self, user_loop: UserLoop) -> None:
        self._user_loop = user_loop
        self._loaded: OrderedDict[tuple[RunRef, Owner | None], _Loaded] = OrderedDict()

    @asynccontextmanager
    async def using(self, run: RunRef) -> AsyncIterator[RolloutRunner]:
        """The run's user code, loaded at least until the block ends. After a failed load, the next
        caller retries."""
        key = run, await asyncio.to_thread(find_owner, ArtifactStore.of(run))
        loaded = self._loaded.get(key)
        if loaded is None or (loaded.task.done() and loaded.runner is None):
            loading = self._user_loop.run(lambda: _load(run), may_block=LOAD_TIMEOUT)
            loaded = self._loaded[key] = _Loaded(asyncio.create_task(loading))
        self._loaded.move_to_end(key)
        loaded.users += 1
        try:
            yield await asyncio.shield(loaded.task)
        finally:
            loaded.users -= 1
            self._let_go()

    def close(self) -> None:
        """Close all user code. Must be called on the user loop, once nothing else runs there."""
        for loaded in self._loaded.values():
            if loaded.runner is not None:
                loaded.runner.close()
        self._loaded.clear()

    def _let_go(self) -> None:
        """Close the least recently used code that isn't in use, beyond MAX_RUNS."""
        idle = [key for key, each in self._loaded.items() if not each.users and each.task.done()]
        for key in idle[: max(0, len(self._loaded) - MAX_RUNS)]:
            runner = self._loaded.pop(key).runner
            if runner is not None:
                self._user_loop.call(runner.close)


async def _load(run: RunRef) -> RolloutRunner:
    return RolloutRunner(run)
