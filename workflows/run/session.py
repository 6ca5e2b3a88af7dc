"""The run's side of a lease: asking for it, working under it, noticing its end, giving it back.

Every mutation goes through `run`, which ends with LeaseLostError as soon as the lease is known to
be lost, whatever the mutation itself does. Doesn't own what is mutated when.
"""

import asyncio
import builtins
import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType
from temporalio.workflow import ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from activities.contracts import LEASE_SLOTS
    from activities.failure_types import LEASE_CLOSED, FailureKind
    from activities.messages import LeaseRef
    from everburn.config import RunConfig
    from workflows.children.trainer_lease import TrainerLease
    from workflows.messages import (
        LeaseEnded,
        LeaseGranted,
        LeaseOrder,
        LeaseWaiting,
        ProvisioningWait,
    )
    from workflows.run.state import RunState

T = TypeVar("T")

MUTATION_TIMEOUT = timedelta(hours=2)
"""The SDK polls a result for ever; longer than this no request takes."""
MUTATION_HEARTBEAT = timedelta(seconds=15)
"""A task that the server has handed out may never arrive at the holder, which then lives and knows
nothing of it; and whoever executes one heartbeats by itself."""
PICK_UP_TIMEOUT = timedelta(seconds=30)
RELEASE_TIMEOUT = timedelta(seconds=60)


class LeaseLostError(Exception):
    """The lease ended under the run."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class TrainerSession:
    def __init__(self, state: RunState, config: RunConfig) -> None:
        self._state = state
        self._provisioning = _provisioning(config)
        self._slots = asyncio.Semaphore(LEASE_SLOTS // 2)
        self._unborn = False
        """Whether the server hasn't started the current lease's workflow yet."""
        self._in_flight = 0
        """Operations on the current lease that count against their step and have no answer yet."""
        self._interrupted = False
        """Whether the current lease failed while one was in flight."""

    @property
    def ref(self) -> LeaseRef:
        return LeaseRef(run=self._state.run, epoch=self._state.epoch)

    @property
    def lost(self) -> bool:
        return self._state.lease_end is not None

    async def acquire(self, unwanted: Callable[[], bool] = lambda: False) -> None:
        """Start a TrainerLease under the next epoch, and wait until it holds a session.

        unwanted: whether there is no need for one any more.

        Raises:
            LeaseLostError: none was to be had, or none is wanted.
        """
        state = self._state
        state.epoch += 1
        state.grant, state.lease_end = None, None
        self._unborn = True
        self._interrupted = False
        try:
            child = await workflow.start_child_workflow(
                TrainerLease.run,
                LeaseOrder(run=state.run, epoch=state.epoch, provisioning=self._provisioning),
                id=self.workflow_id,
                parent_close_policy=ParentClosePolicy.ABANDON,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                static_summary=f"trainer lease, epoch {state.epoch}",
            )
        finally:
            self._unborn = False
        epoch = state.epoch
        child.add_done_callback(lambda task: self._on_child_closed(epoch, task))
        await workflow.wait_condition(lambda: state.grant is not None or self.lost or unwanted())
        if state.grant is None and not self.lost:
            await self.abandon(LeaseLostError("no session is wanted any more", "Unwanted"))
        self.check()

    def on_waiting(self, message: LeaseWaiting) -> None:
        if message.epoch == self._state.epoch and self._state.grant is None:
            self._state.waiting_for = message.text

    def on_granted(self, message: LeaseGranted) -> None:
        """Take in the session. A lease has one, whatever else is granted under its epoch."""
        state, grant = self._state, message.grant
        if grant.epoch != state.epoch or grant == state.grant:
            return
        if state.grant is None:
            state.grant = grant
            state.leases += 1
            state.progressed(workflow.time())
        else:
            # Another session, whose state is unknown; the one that was held has been given up.
            self._lose("the lease's workflow was reset")

    def on_ended(self, message: LeaseEnded) -> None:
        """What is known of its end stays: the run may have acted on it already."""
        if message.epoch == self._state.epoch:
            self._state.lease_end = self._state.lease_end or message

    def _on_child_closed(self, epoch: int, child: "asyncio.Task[None]") -> None:
        """The server tells this execution at once of a lease that was terminated, or has failed."""
        failed = child.cancelled() or child.exception() is not None
        if failed and epoch == self._state.epoch:
            self.on_closed()

    def on_closed(self) -> None:
        """The lease's workflow is closed, whatever it meant to say."""
        self._lose("the lease's workflow was ended")

    def _lose(self, error: str) -> None:
        self._state.lease_end = self._state.lease_end or LeaseEnded(
            epoch=self._state.epoch, error=error, error_type=FailureKind.TRAINER_STATE_LOST
        )

    def check(self) -> None:
        """Raise LeaseLostError if the lease is known to have ended."""
        end = self._state.lease_end
        if end is not None:
            raise LeaseLostError(
                end.error or "the lease ended", end.error_type or FailureKind.TRAINER_STATE_LOST
            )

    @property
    def interrupted(self) -> bool:
        """Whether the current lease failed while an operation of the step was in flight."""
        return self._interrupted or (self.lost and self._in_flight > 0)

    async def run(
        self,
        activity: Callable[[Any, Any], Any],
        order: Any,
        summary: str,
        *,
        counts: bool = True,
    ) -> Any:
        """Execute a mutation on the holder, once.

        counts: whether a lease that fails over it makes the step suspect; false in a recovery.

        Raises:
            LeaseLostError: the lease ended, or the mutation's outcome is in doubt, for the trainer
                or for the run's folder.
            ActivityError: the trainer refused the request, and its state is untouched; or what was
                asked can't be done with what the folder has, by no trainer.
        """
        self.check()
        grant = self._state.grant
        assert grant is not None
        async with self._slots:
            self.check()
            if self._state.grant is not grant:
                # Its turn came when the run was asking for the next session already.
                raise LeaseLostError("the lease ended", FailureKind.TRAINER_STATE_LOST)
            mutation = asyncio.ensure_future(
                workflow.execute_activity_method(
                    activity,
                    order,
                    task_queue=grant.task_queue,
                    schedule_to_start_timeout=PICK_UP_TIMEOUT,
                    start_to_close_timeout=MUTATION_TIMEOUT,
                    heartbeat_timeout=MUTATION_HEARTBEAT,
                    retry_policy=RetryPolicy(maximum_attempts=1),
                    summary=summary,
                )
            )
            self._in_flight += counts
            try:
                await workflow.wait_condition(lambda: mutation.done() or self.lost)
            finally:
                self._in_flight -= counts
        if not mutation.done():
            self._interrupt(grant.epoch, counts)
            mutation.add_done_callback(look_at_outcome)
            mutation.cancel()
            self.check()
        try:
            return await mutation
        except ActivityError as error:
            if _is_refused(error.cause):
                raise
            self._interrupt(grant.epoch, counts and not _never_started(error.cause))
            raise _lost_by(error.cause) from error

    def _interrupt(self, epoch: int, in_flight: bool) -> None:
        if epoch == self._state.epoch:
            self._interrupted = self._interrupted or in_flight

    async def release(self) -> None:
        """Give the session back; waits until it is, but not for ever."""
        state = self._state
        if state.epoch == 0 or self.lost:
            return
        try:
            await workflow.get_external_workflow_handle(self.workflow_id).signal("release")
            await workflow.wait_condition(lambda: self.lost, timeout=RELEASE_TIMEOUT)
        except (ApplicationError, builtins.TimeoutError) as error:
            workflow.logger.warning("lease %s wasn't given back: %s", state.epoch, error)

    async def abandon(self, loss: LeaseLostError) -> None:
        """The lease is in doubt: for the run it has ended, whatever its holder thinks, and nothing
        is asked of it again. The holder, if there still is one, may close the session."""
        state = self._state
        if state.epoch == 0 or self.lost:
            return
        state.lease_end = LeaseEnded(epoch=state.epoch, error=str(loss), error_type=loss.kind)
        with contextlib.suppress(ApplicationError):
            await workflow.get_external_workflow_handle(self.workflow_id).signal("release")

    @property
    def workflow_id(self) -> str:
        return f"{self._state.run.id}/lease-{self._state.epoch}"

    @property
    def awaited_id(self) -> str | None:
        """Of the lease that is in force: looked for, its workflow must be found running."""
        missing = self._state.epoch == 0 or self.lost or self._unborn
        return None if missing else self.workflow_id


def _provisioning(config: RunConfig) -> ProvisioningWait | None:
    """What a lease of dedicated training may wait for beforehand."""
    if not config.dedicated:
        return None
    wish = config.trainer_provisioning
    return ProvisioningWait(pending_timeout=wish.pending_timeout, ready_timeout=wish.ready_timeout)


def _is_refused(cause: BaseException | None) -> bool:
    """Whether a mutation failed with nothing in doubt."""
    ended = {FailureKind.TRAINER_STATE_LOST, FailureKind.TRAINER_FAILED, *LEASE_CLOSED}
    return isinstance(cause, ApplicationError) and cause.type not in ended


def _never_started(cause: BaseException | None) -> bool:
    """Whether no worker took the mutation up before its timeout."""
    return isinstance(cause, TimeoutError) and cause.type == TimeoutType.SCHEDULE_TO_START


def _lost_by(cause: BaseException | None) -> LeaseLostError:
    """What any other failure of a mutation means: the session's state is lost or in doubt."""
    if isinstance(cause, TimeoutError):
        return LeaseLostError(
            f"{cause.message}: its outcome is in doubt", FailureKind.TRAINER_STATE_LOST
        )
    if isinstance(cause, ApplicationError) and cause.type in {
        FailureKind.TRAINER_FAILED,
        *LEASE_CLOSED,
    }:
        return LeaseLostError(cause.message, str(cause.type))
    return LeaseLostError(getattr(cause, "message", str(cause)), FailureKind.TRAINER_STATE_LOST)


def look_at_outcome(future: "asyncio.Future[Any]") -> None:
    """Look at an outcome that may matter to nobody any more, so that asyncio doesn't log it as
    forgotten."""
    if not future.cancelled():
        future.exception()
