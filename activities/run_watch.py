"""Whether the run still exists for which a process works.

A terminated run cancels nothing. Owns the looks at the server, one rhythm for all that a process
does for a run, and what follows: its work is cancelled. Doesn't own trainer sessions (trainer.py).
"""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError

from activities.failure_types import application_error
from activities.reconciliation import is_open
from everburn.refs import RunRef

T = TypeVar("T")

log = logging.getLogger(__name__)

INTERVAL = 5.0
"""Seconds between looks, while anything is done for the run."""


class RunGoneError(RuntimeError):
    """The run was terminated, or reset: nobody waits for what is done for it."""


class RunWatch:
    """What a process does, by run."""

    def __init__(self) -> None:
        self._works: dict[RunRef, set[asyncio.Future[Any]]] = {}
        self._looks: dict[RunRef, asyncio.Task[None]] = {}

    async def unless_gone(self, run: RunRef, work: Awaitable[T]) -> T:
        """The outcome of work of an activity; it is cancelled once the run is gone.

        Raises:
            ApplicationError: RunGoneError, for good.
        """
        task = asyncio.ensure_future(work)
        works = self._works.setdefault(run, set())
        works.add(task)
        if run not in self._looks:
            self._looks[run] = asyncio.create_task(self._look(activity.client(), run))
        try:
            return await task
        except asyncio.CancelledError:
            if task in works:
                raise
            gone = RunGoneError(f"run {run.id} is gone; what was done for it is cancelled")
            raise application_error(gone) from None
        finally:
            works.discard(task)

    async def _look(self, client: Client, run: RunRef) -> None:
        """As long as there is work: it may pause between two looks."""
        works = self._works[run]
        try:
            while True:
                await asyncio.sleep(INTERVAL)
                if not works:
                    return
                try:
                    gone = not await is_open(client, run.id)
                except RPCError as error:
                    log.warning("can't look after run %s: %s", run.id, error)
                    continue
                while gone and works:
                    works.pop().cancel()
        finally:
            del self._looks[run], self._works[run]
