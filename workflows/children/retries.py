"""Attempts at an activity that runs user code: a completion's, a shard's of an evaluation.

Owns the failure policy: how an activity has ended, what counts against it, when it is begun again.
Doesn't own what follows once its attempts are used up (prompt_group.py, evaluation.py).
"""

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    TimeoutError,
    TimeoutType,
)

with workflow.unsafe.imports_passed_through():
    from activities.failure_types import WAITS_FOR, FailureKind, kind_of, message_of

T = TypeVar("T")

ONCE = RetryPolicy(maximum_attempts=1)
"""Of such an activity: only here can a lost worker be told from a failed rollout."""
MAX_FAILURES = 3
"""Recoverable failures before it is given up."""
MAX_LOSSES = 10
"""Lost workers before they count as a failure: a row that kills its worker each time must not do so
for ever, since all that runs beside it dies too."""
BACKOFF = (1, 2, 4, 8, 15, 30, 60)
"""Seconds before another attempt."""
LONGEST_AFTER_LOSS = 15
TIMES_UNFIT = 3
"""Workers without its code before the wait for another one grows: chance decides who is handed it
next, and the one that is idle beside a fit worker is the unfit one. History grows faster by that
for the first minutes only."""
MAX_ERROR = 120
"""Characters of a failure that are shown beside what is waited for."""


class AttemptsUsedUpError(Exception):
    """It has failed as often as it may; `error` is the last failure."""

    def __init__(self, error: ActivityError) -> None:
        super().__init__(str(error.cause))
        self.error = error


async def in_attempts(what: str, begin: Callable[[int], Awaitable[T]]) -> T:
    """The result of an activity, begun as often as it takes; `begin` gets the number of earlier
    attempts.

    Raises:
        ActivityError: fatal, or cancelled.
        AttemptsUsedUpError
    """
    failures = losses = waits = unfit = 0
    while True:
        try:
            return await begin(failures + losses + waits + unfit)
        except ActivityError as error:
            kind = _kind(error)
            if kind == FailureKind.RECOVERABLE:
                failures += 1
            elif kind == FailureKind.WORKER_LOST:
                losses += 1
            elif kind == FailureKind.WORKER_UNFIT:
                unfit += 1
            elif kind in WAITS_FOR:
                waits += 1
            else:
                raise
            if failures >= MAX_FAILURES or losses >= MAX_LOSSES:
                raise AttemptsUsedUpError(error) from error
            turn = failures + losses + waits + math.ceil(unfit / TIMES_UNFIT)
            delay: float = BACKOFF[min(turn, len(BACKOFF)) - 1]
            if kind == FailureKind.WORKER_LOST:
                # Scattered: beside one that kills its worker each time, all would die again.
                spread = min(delay, LONGEST_AFTER_LOSS) * workflow.random().random()
                delay = 0 if losses == 1 else spread
            if kind != FailureKind.WORKER_SHUTDOWN and delay:
                await _back_off(delay, what, kind, error)


async def _back_off(delay: float, what: str, kind: FailureKind, error: ActivityError) -> None:
    if kind not in WAITS_FOR:
        await workflow.sleep(delay, summary=f"{what}: {kind}")
        return
    text = f"{what}: waiting for {WAITS_FOR[kind]}: {message_of(error)[:MAX_ERROR]}"
    workflow.logger.info(text)
    workflow.set_current_details(text)
    await workflow.sleep(delay, summary=text)
    workflow.set_current_details("")


def _kind(error: ActivityError) -> FailureKind | None:
    cause = error.cause
    if isinstance(cause, TimeoutError):
        is_lost = cause.type == TimeoutType.HEARTBEAT
        return FailureKind.WORKER_LOST if is_lost else FailureKind.RECOVERABLE
    return kind_of(cause)
