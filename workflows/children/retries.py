"""Attempts at an activity that runs user code: a completion, or a shard of an evaluation.

Owns the failure policy: how an activity has ended, what counts against it, when it is retried.
Doesn't own what follows once its attempts are used up (prompt_group.py, evaluation.py).
"""

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, TimeoutError, TimeoutType

with workflow.unsafe.imports_passed_through():
    from activities.failure_types import WAITS_FOR, FailureKind, kind_of, message_of

T = TypeVar("T")

ONCE = RetryPolicy(maximum_attempts=1)
"""Only this module can distinguish a lost worker from a failed rollout."""
MAX_FAILURES = 3
"""Recoverable failures before the activity is given up."""
MAX_WORKER_FAILURES = 10
"""Lost workers before the activity is given up: a row that kills its worker each time also kills
everything that runs on it."""
BACKOFF = (1, 2, 4, 8, 15, 30, 60)
"""Seconds before another attempt."""
LONGEST_AFTER_WORKER_FAILURE = 15
TIMES_UNFIT = 3
"""Attempts on workers without the code per step of the pause: an idle worker without the code is
the likeliest to be assigned the next one."""
MAX_ERROR = 120
"""Characters of a failure in a timer's summary."""


class AttemptsUsedUpError(Exception):
    """The activity has failed as often as it may; `error` is the last failure."""

    def __init__(self, error: ActivityError) -> None:
        super().__init__(str(error.cause))
        self.error = error


async def in_attempts(what: str, begin: Callable[[int], Awaitable[T]]) -> T:
    """Attempt an activity until it succeeds; `begin` gets the number of earlier attempts.

    Raises:
        ActivityError: fatal, or cancelled.
        AttemptsUsedUpError
    """
    failures = worker_failures = waits = unfit = 0
    while True:
        try:
            return await begin(failures + worker_failures + waits + unfit)
        except ActivityError as error:
            kind = _kind(error)
            if kind == FailureKind.RECOVERABLE:
                failures += 1
            elif kind == FailureKind.WORKER_FAILED:
                worker_failures += 1
            elif kind == FailureKind.WORKER_UNFIT:
                unfit += 1
            elif kind in WAITS_FOR:
                waits += 1
            else:
                raise
            if failures >= MAX_FAILURES or worker_failures >= MAX_WORKER_FAILURES:
                raise AttemptsUsedUpError(error) from error
            turn = failures + worker_failures + waits + math.ceil(unfit / TIMES_UNFIT)
            delay: float = BACKOFF[min(turn, len(BACKOFF)) - 1]
            if kind == FailureKind.WORKER_FAILED:
                # Random: what was lost together must not meet the row that kills its worker again.
                spread = min(delay, LONGEST_AFTER_WORKER_FAILURE) * workflow.random().random()
                delay = 0 if worker_failures == 1 else spread
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
        return FailureKind.WORKER_FAILED if is_lost else FailureKind.RECOVERABLE
    return kind_of(cause)
