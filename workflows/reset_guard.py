"""Resets: `temporal workflow reset` makes a new execution from the first part of an old history.

Such an execution assumes a trainer state, a ledger and children that have changed since, so it must
do nothing, and end. Owns how an execution detects that it is one. `everburn resume` and `everburn
fork` continue from the run's folder.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

WAS_RESET = "WasReset"


class ResetGuard:
    """Ends the workflow's main task once its execution proves to be a reset one.

    Create it in the workflow's `__init__`. Only a reset gives an execution a new random seed, at
    the point where the old history ends. An execution that was reset to its first task has no old
    history, but another run id than its first event.
    """

    def __init__(self, stop: Callable[[], None] = lambda: None) -> None:
        self._stop = stop
        self._main: asyncio.Task[Any] | None = None
        info = workflow.info()
        renamed = info.run_id != info.original_execution_run_id
        self.was_reset = renamed and not workflow.unsafe.is_replaying()
        workflow.register_random_seed_callback(self._on_new_seed)

    def watch(self) -> None:
        """To be called first by the main task. Raises if the execution is a reset one."""
        self._main = asyncio.current_task()
        self.check()

    def check(self) -> None:
        """Raise if the execution is a reset one."""
        if self.was_reset:
            raise self.error()

    def error(self) -> ApplicationError:
        """What the workflow fails with."""
        return ApplicationError(
            f"{workflow.info().workflow_id} was reset, and can't continue from there: its trainer, "
            "ledger and rollouts have moved on. Nothing was done. Continue with `everburn resume`, "
            "or from an earlier step with `everburn fork`",
            type=WAS_RESET,
            non_retryable=True,
        )

    def _on_new_seed(self, seed: int) -> None:
        self.was_reset = True
        self._stop()
        if self._main is not None:
            self._main.cancel()
