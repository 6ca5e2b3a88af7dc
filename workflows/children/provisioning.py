"""Provisioning: waiting for a run's trainer job and deployment, and releasing them.

Owns the rhythm of checks and the limits of the wait: short activities and timers, since capacity
may take days and must not block a worker. Doesn't own the check itself (everburn/trainers/jobs.py)
or which workflow waits (trainer_lease.py).
"""

from collections.abc import Awaitable, Callable
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.contracts import ProvisioningContract
    from activities.failure_types import FailureKind, message_of
    from activities.messages import ProvisioningReadiness
    from everburn.records.ids import RunRef
    from workflows.messages import ProvisioningWait
    from workflows.queues import TRAINER_QUEUE

FIRST_INTERVAL, LONGEST_INTERVAL = 1.0, 60.0
"""Seconds between checks: doubled from the first to the longest; first again on progress."""
MAX_RESUMPTIONS = 5
"""Times that a job may stop before it has run: then its configuration or machines are at fault."""
MAX_HISTORY = 1_500
"""Events after which the wait continues in a new execution; a check costs about a dozen."""
CHECK_TIMEOUT = timedelta(minutes=8)
"""The SDK itself repeats a failing request for five minutes."""
CHECK_ATTEMPTS = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    maximum_interval=timedelta(seconds=30),
    maximum_attempts=30,
)
"""About 15 minutes for an unreachable control plane; the wait for a trainer worker has no limit."""
CLEANUP_PATIENCE = timedelta(minutes=10)
"""Includes the wait for a trainer worker: a run must end."""
HEARTBEAT_TIMEOUT = timedelta(seconds=10)


class WaitIsLongError(Exception):
    """The wait continues in a new execution: history is long."""


class Provisioning:
    """The wait for one lease's job and deployment. so_far: includes earlier executions. tell: is
    called with what is waited for, whenever that changes."""

    def __init__(
        self, run: RunRef, so_far: ProvisioningWait, tell: Callable[[str], Awaitable[None]]
    ) -> None:
        self.so_far = so_far
        self._run = run
        self._tell = tell

    async def wait(self, given_up: Callable[[], bool]) -> bool:
        """Return true once both are ready, false if they aren't wanted any more.

        Raises:
            ActivityError: they are unavailable; the type of its cause says what to do.
            ApplicationError: they weren't ready in time.
            WaitIsLongError
        """
        reported = ""
        interval = FIRST_INTERVAL
        while not given_up():
            found = await self._poll()
            if found.stage in ("ready", "unwanted"):
                return found.stage == "ready"
            self._check(found)
            if found.text != reported:
                reported, interval = found.text, FIRST_INTERVAL
                await self._tell(found.text)
            if workflow.info().get_current_history_length() > MAX_HISTORY and not given_up():
                raise WaitIsLongError
            await wait_or(given_up, interval)
            interval = min(2 * interval, LONGEST_INTERVAL)
        return False

    async def _poll(self) -> ProvisioningReadiness:
        return await workflow.execute_activity_method(
            ProvisioningContract.advance_provisioning,
            self._run,
            task_queue=TRAINER_QUEUE,
            start_to_close_timeout=CHECK_TIMEOUT,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            retry_policy=CHECK_ATTEMPTS,
            summary="trainer job and deployment",
        )

    def _check(self, found: ProvisioningReadiness) -> None:
        """Raise if the wait has reached a limit."""
        wait = self.so_far = self.so_far.continued(found, workflow.time())
        if wait.resumptions > MAX_RESUMPTIONS:
            raise _unavailable(f"it stopped {wait.resumptions} times before it ran: {found.text}")
        elapsed = workflow.time() - wait.stage_begun
        limit = wait.pending_timeout if wait.stage == "pending" else wait.ready_timeout
        if elapsed > limit:
            raise _unavailable(f"still so after {limit:g} s: {found.text}")


async def wait_or(given_up: Callable[[], bool], seconds: float) -> None:
    try:
        await workflow.wait_condition(given_up, timeout=seconds)
    except TimeoutError:
        return


async def clean_up(run: RunRef, *, orphaned: bool = False) -> str | None:
    """Release what the run created; returns why that failed, if it did. orphaned: the run is gone;
    if it is resumed first, nothing is released."""
    try:
        done = await workflow.execute_activity_method(
            ProvisioningContract.clean_up_provisioning,
            args=[run, orphaned],
            task_queue=TRAINER_QUEUE,
            start_to_close_timeout=CHECK_TIMEOUT,
            schedule_to_close_timeout=CLEANUP_PATIENCE,
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
            retry_policy=CHECK_ATTEMPTS,
            summary="give back trainer job and deployment",
        )
    except ActivityError as error:
        if is_cancelled_exception(error):
            raise
        return f"cleanup: {message_of(error)}"
    workflow.logger.info("%s", done)
    return None


def _unavailable(text: str) -> ApplicationError:
    return ApplicationError(text, type=FailureKind.NOT_PROVISIONED, non_retryable=True)
