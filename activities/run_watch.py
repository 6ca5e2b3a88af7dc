"""Whether the run still exists for which a process works.

A terminated run cancels nothing, and resumed it begins its rows anew. Owns the looks at the server,
one rhythm for all that a process does for a life of a run, and what follows: its work is cancelled.
Doesn't own trainer sessions (trainer.py).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError

from activities.failure_types import application_error
from activities.messages import RunLife
from activities.reconciliation import goes_on, is_open
from everburn.records.store import StoreError

T = TypeVar("T")

log = logging.getLogger(__name__)

INTERVAL = 5.0
"""Seconds between looks, while anything is done for the run."""
ANSWER_TIMEOUT = 30.0
"""Seconds to wait for the server's word before something is written."""


class RunGoneError(RuntimeError):
    """The run was terminated, or reset, and perhaps resumed: nobody waits for what was begun."""


def last_look(within: RunLife) -> Callable[[], None]:
    """A look for a thread of the current activity, just before it writes what would stay: whether
    the workflow that asked for it, and the run, are still there. That may be long ago.

    Raises, when it is taken:
        ApplicationError: RunGoneError, for good; what stands in the way of an answer, for now.
    """
    client, info, loop = activity.client(), activity.info(), asyncio.get_running_loop()
    asker, execution = info.workflow_id, info.workflow_run_id
    assert asker is not None

    async def is_awaited() -> bool:
        return await is_open(client, asker, execution) and await goes_on(client, within)

    def look() -> None:
        answer = asyncio.run_coroutine_threadsafe(is_awaited(), loop)
        try:
            awaited = answer.result(ANSWER_TIMEOUT)
        except (RPCError, StoreError, TimeoutError) as error:
            raise application_error(error, retryable=True) from error
        if not awaited:
            gone = RunGoneError(f"{asker} isn't waited for any more: nothing is written for it")
            raise application_error(gone)

    return look


class RunWatch:
    """What a process does, by run and life."""

    def __init__(self) -> None:
        self._works: dict[RunLife, set[asyncio.Future[Any]]] = {}
        self._looks: dict[RunLife, asyncio.Task[None]] = {}

    async def unless_gone(self, within: RunLife, work: Awaitable[T]) -> T:
        """The outcome of work of an activity; it is cancelled once the run is gone.

        Raises:
            ApplicationError: RunGoneError, for good.
        """
        task = asyncio.ensure_future(work)
        works = self._works.setdefault(within, set())
        works.add(task)
        if within not in self._looks:
            self._looks[within] = asyncio.create_task(self._look(activity.client(), within))
        try:
            return await task
        except asyncio.CancelledError:
            if task in works:
                raise
            gone = RunGoneError(f"run {within.run.id} is gone; what was done for it is cancelled")
            raise application_error(gone) from None
        finally:
            works.discard(task)

    async def _look(self, client: Client, within: RunLife) -> None:
        """As long as there is work: it may pause between two looks."""
        works = self._works[within]
        try:
            while True:
                await asyncio.sleep(INTERVAL)
                if not works:
                    return
                try:
                    gone = not await goes_on(client, within)
                except (RPCError, StoreError) as error:
                    log.warning("can't look after run %s: %s", within.run.id, error)
                    continue
                while gone and works:
                    works.pop().cancel()
        finally:
            del self._looks[within], self._works[within]
