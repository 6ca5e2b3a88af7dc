"""TrainerLease: one trainer session from its opening to its end, visible and detectable.

Acquires a session, reports it to the run, holds it until it is released or lost, and reports that
too. Owns nothing of training: mutations go directly to the lease's own task queue.
"""

import asyncio
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy, VersioningBehavior
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    TimeoutError,
)
from temporalio.workflow import ActivityCancellationType

with workflow.unsafe.imports_passed_through():
    from activities.contracts import HolderContract, TrainerContract
    from activities.failure_types import FailureKind
    from activities.messages import LeaseGrant
    from workflows.children.provisioning import Provisioning, WaitIsLongError, clean_up
    from workflows.messages import LeaseEnded, LeaseGranted, LeaseOrder, LeaseWaiting
    from workflows.queues import TRAINER_QUEUE
    from workflows.reset_guard import ResetGuard

ACQUIRE_TIMEOUT = timedelta(minutes=15)
ACQUIRE_ATTEMPTS = RetryPolicy(maximum_attempts=3)
ACQUIRE_HEARTBEAT = timedelta(seconds=5)
"""A paused holder may be assigned its own successor's task first."""
HOLD_HEARTBEAT = timedelta(seconds=3)
"""How long a dead holder stays undetected."""
HOLD_TIMEOUT = timedelta(days=365)
HOLDER_START = timedelta(seconds=10)
"""A holder that doesn't poll its own queue for so long is gone."""


@workflow.defn
class TrainerLease:
    @workflow.init
    def __init__(self, order: LeaseOrder) -> None:
        self._order = order
        self._lease = order.lease
        self._release = False
        self._orphaned = False
        """Whether the run was found to be gone."""
        self._guard = ResetGuard()

    @workflow.run
    async def run(self, order: LeaseOrder) -> None:
        self._guard.watch()
        try:
            await self._live()
            await self._clean_up_if_orphaned()
        except (Exception, asyncio.CancelledError):
            if self._guard.was_reset:
                raise self._guard.error() from None
            raise

    @workflow.signal
    def release(self) -> None:
        """The run doesn't need the lease any more."""
        self._release = True

    async def _live(self) -> None:
        try:
            if not await self._is_provisioned():
                await self._tell_ended(None)
                return
            grant = await self._acquire()
        except (ActivityError, ApplicationError, asyncio.CancelledError) as error:
            self._guard.check()
            await self._tell_ended(None if self._release else error)
            return
        await self._signal("lease_granted", LeaseGranted(grant=grant))
        await self._hold(grant)

    async def _is_provisioned(self) -> bool:
        """Wait for the trainer job and the deployment that a dedicated lease needs; false if it
        was released meanwhile."""
        order = self._order
        if order.provisioning is None:
            return True

        async def tell(text: str) -> None:
            incarnation, lease_epoch = order.lease.lease_key
            waiting = LeaseWaiting(incarnation=incarnation, lease_epoch=lease_epoch, text=text)
            await self._signal("lease_waiting", waiting)

        provisioning = Provisioning(order.lease.run, order.provisioning, tell)
        try:
            return await provisioning.wait(lambda: self._release)
        except asyncio.CancelledError:
            self._guard.check()
            self._release = True
            return False
        except WaitIsLongError:
            workflow.continue_as_new(order.model_copy(update={"provisioning": provisioning.so_far}))

    async def _clean_up_if_orphaned(self) -> None:
        """A run that is gone can't clean up itself."""
        if self._orphaned and self._order.provisioning is not None:
            await clean_up(self._lease.run, orphaned=True)

    async def _acquire(self) -> LeaseGrant:
        """Open a session; returned even if the run has released the lease meanwhile.

        Raises:
            ActivityError, asyncio.CancelledError: none was available, or is wanted.
        """
        acquiring = asyncio.ensure_future(
            workflow.execute_activity_method(
                TrainerContract.acquire_lease,
                self._lease,
                task_queue=TRAINER_QUEUE,
                start_to_close_timeout=ACQUIRE_TIMEOUT,
                heartbeat_timeout=ACQUIRE_HEARTBEAT,
                retry_policy=ACQUIRE_ATTEMPTS,
                cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
                summary=f"lease {self._lease.lease_key.text} · acquire",
            )
        )
        await self._released_or(acquiring)
        if not acquiring.done():
            acquiring.cancel()
        return await asyncio.shield(acquiring)

    async def _released_or(self, ended: "asyncio.Future[Any]") -> None:
        """Return once `ended` is done, or the run, or a person who cancels, releases the lease."""
        try:
            await workflow.wait_condition(lambda: self._release or ended.done())
        except asyncio.CancelledError:
            self._guard.check()
            self._release = True

    async def _hold(self, grant: LeaseGrant) -> None:
        holding = asyncio.ensure_future(
            workflow.execute_activity_method(
                HolderContract.hold_lease,
                self._lease,
                task_queue=grant.task_queue,
                schedule_to_start_timeout=HOLDER_START,
                start_to_close_timeout=HOLD_TIMEOUT,
                heartbeat_timeout=HOLD_HEARTBEAT,
                retry_policy=RetryPolicy(maximum_attempts=1),
                summary=f"lease {grant.lease_key.text} · held by {grant.holder} · {grant.session}",
            )
        )
        await self._released_or(holding)
        if holding.done():
            await self._tell_ended(holding.exception())
            return
        await asyncio.shield(asyncio.create_task(self._give_back(grant, holding)))
        await self._tell_ended(None)

    async def _give_back(self, grant: LeaseGrant, holding: "asyncio.Future[None]") -> None:
        try:
            await workflow.execute_activity_method(
                HolderContract.release_lease,
                self._lease,
                task_queue=grant.task_queue,
                schedule_to_start_timeout=HOLDER_START,
                start_to_close_timeout=timedelta(seconds=60),
                retry_policy=RetryPolicy(maximum_attempts=1),
                summary=f"lease {grant.lease_key.text} · release",
            )
            await holding
        except ActivityError as error:
            # The holder died first; the service ends sessions without heartbeats.
            workflow.logger.warning(
                "lease %s wasn't released: %s", grant.lease_key.text, error.cause
            )

    async def _tell_ended(self, error: BaseException | None) -> None:
        cause = error.cause if isinstance(error, ActivityError) else error
        kind: str | None = None
        text = None
        if isinstance(cause, TimeoutError):
            kind = FailureKind.TRAINER_STATE_LOST
            text = f"the lease's holder is gone: {cause.message}"
        elif isinstance(cause, ApplicationError):
            kind, text = cause.type, cause.message
        elif cause is not None:
            kind, text = FailureKind.TRAINER_STATE_LOST, str(cause)
        incarnation, lease_epoch = self._lease.lease_key
        ended = LeaseEnded(
            incarnation=incarnation, lease_epoch=lease_epoch, error=text, error_type=kind
        )
        await asyncio.shield(asyncio.create_task(self._signal("lease_ended", ended)))

    async def _signal(self, name: str, message: LeaseWaiting | LeaseGranted | LeaseEnded) -> None:
        try:
            await workflow.get_external_workflow_handle(self._lease.run.id).signal(name, message)
        except ApplicationError as error:
            # The run is gone, and its session of no use.
            workflow.logger.info("run %s can't be reached: %s", self._lease.run.id, error)
            self._release = self._orphaned = True


@workflow.defn(name="TrainerLease", versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class UpgradedTrainerLease(TrainerLease):
    """A TrainerLease on versioned workers. It lives as long as its session: pinned to the build
    that it began on, as other workflows are, it would keep that build in use. Unversioned workers
    can't declare the behavior."""

    @workflow.init
    def __init__(self, order: LeaseOrder) -> None:
        super().__init__(order)

    @workflow.run
    async def run(self, order: LeaseOrder) -> None:
        await super().run(order)
