"""Resets: `temporal workflow reset` makes a new execution out of the first part of an old history.

Such an execution remembers a trainer state, a ledger and children as they were; all of them have
moved on, and can't be taken back. So it must do nothing, and end. Owns how an execution learns that
it is one. What the run came to lies in its folder: `everburn resume` and `everburn fork` go on from
there.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

WAS_RESET = "WasReset"


class ResetGuard:
    """Ends the workflow's main task as soon as its execution turns out to be a reset one.

    Made in the workflow's `__init__`. Temporal gives each reset execution a new random seed, at the
    very point where the old history ends; nothing else does. One that was reset to its first task
    has no old history, and another run id than its first event has.
    """

    def __init__(self, stop: Callable[[], None] = lambda: None) -> None:
        self._stop = stop
        self._main: asyncio.Task[Any] | None = None
        info = workflow.info()
        renamed = info.run_id != info.original_execution_run_id
        self.was_reset = renamed and not workflow.unsafe.is_replaying()
        workflow.register_random_seed_callback(self._on_new_seed)

    def watch(self) -> None:
        """Called by the main task, at its beginning. Raises if it must not begin."""
        self._main = asyncio.current_task()
        self.check()

    def check(self) -> None:
        """Raise if the execution is a reset one."""
        if self.was_reset:
            raise self.error()

    def error(self) -> ApplicationError:
        """What the workflow fails with."""
        return ApplicationError(
            f"{workflow.info().workflow_id} was reset, and can't go on from there: its trainer, "
            "ledger and rollouts have moved on. Nothing was done. Go on with `everburn resume`, or "
            "from an earlier step with `everburn fork`",
            type=WAS_RESET,
            non_retryable=True,
        )

    def _on_new_seed(self, seed: int) -> None:
        self.was_reset = True
        self._stop()
        if self._main is not None:
            self._main.cancel()
