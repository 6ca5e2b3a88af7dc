"""The run's side of a lease: requesting it, working under it, detecting its end, releasing it.

Every mutation goes through `run`, which ends with LeaseFailedError as soon as the lease is known to
be lost, whatever the mutation itself does. Doesn't own which mutations are made when.
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
    from everburn.records.ids import LeaseKey
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
"""The SDK polls a result forever; no request takes longer than this."""
MUTATION_HEARTBEAT = timedelta(seconds=15)
"""A dispatched task can be lost on the way to the holder; heartbeats detect that."""
PICK_UP_TIMEOUT = timedelta(seconds=30)
RELEASE_TIMEOUT = timedelta(seconds=60)


class LeaseFailedError(Exception):
    """The lease ended, or is in doubt."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class TrainerSession:
    def __init__(self, state: RunState, config: RunConfig) -> None:
        self._run = state
        self._state = state.lease
        self._provisioning = _provisioning(config)
        self._slots = asyncio.Semaphore(LEASE_SLOTS // 2)
        self._starting = False
        """Whether the server hasn't started the current lease's workflow yet."""
        self._in_flight = 0
        """Operations of the step on the current lease that have no answer yet."""
        self._interrupted = False
        """Whether the current lease failed while one was in flight."""

    @property
    def ref(self) -> LeaseRef:
        incarnation, lease_epoch = self._run.lease_key
        return LeaseRef(run=self._run.run, incarnation=incarnation, lease_epoch=lease_epoch)

    @property
    def ended(self) -> bool:
        return self._state.end is not None

    @property
    def granted(self) -> bool:
        """Whether the last lease that was requested had a session."""
        return self._state.grant is not None

    async def acquire(self, unwanted: Callable[[], bool] = lambda: False) -> None:
        """Start a TrainerLease under the next lease epoch, and wait until it holds a session.

        unwanted: whether the run doesn't need a session any more.

        Raises:
            LeaseFailedError: no session was available, or none is wanted.
        """
        state = self._state
        state.lease_epoch += 1
        state.grant, state.end = None, None
        self._starting = True
        self._interrupted = False
        lease = self._run.lease_key
        try:
            child = await workflow.start_child_workflow(
                TrainerLease.run,
                LeaseOrder(lease=self.ref, provisioning=self._provisioning),
                id=self.workflow_id,
                parent_close_policy=ParentClosePolicy.ABANDON,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                static_summary=f"trainer lease {lease.text}",
            )
        finally:
            self._starting = False
        child.add_done_callback(lambda task: self._on_child_closed(lease, task))
        await workflow.wait_condition(lambda: self.granted or self.ended or unwanted())
        if not self.granted and not self.ended:
            await self.abandon(LeaseFailedError("no session is wanted any more", "Unwanted"))
        self.check()

    def on_waiting(self, message: LeaseWaiting) -> None:
        if message.lease_key == self._run.lease_key and not self.granted:
            self._run.wait_for(message.text)

    def on_granted(self, message: LeaseGranted) -> None:
        """Take the session. A lease has one session, whatever else is granted to it."""
        state, grant = self._state, message.grant
        if grant.lease_key != self._run.lease_key or grant == state.grant:
            return
        if state.grant is None:
            state.grant = grant
            state.sessions += 1
            self._run.progressed(workflow.time())
        else:
            # Another session, in an unknown state; the first one has been given up.
            self._end("the lease's workflow was reset")

    def on_ended(self, message: LeaseEnded) -> None:
        """The first reason stays: the run may have acted on it already."""
        if message.lease_key == self._run.lease_key:
            self._state.end = self._state.end or message

    def _on_child_closed(self, lease: LeaseKey, child: "asyncio.Task[None]") -> None:
        """A lease's workflow that was terminated, or has failed, doesn't report."""
        failed = child.cancelled() or child.exception() is not None
        if failed and lease == self._run.lease_key:
            self.on_closed()

    def on_closed(self) -> None:
        """The lease's workflow is closed, reported or not."""
        self._end("the lease's workflow was ended")

    def _end(self, error: str, kind: str = FailureKind.TRAINER_STATE_LOST) -> None:
        incarnation, lease_epoch = self._run.lease_key
        self._state.end = self._state.end or LeaseEnded(
            incarnation=incarnation, lease_epoch=lease_epoch, error=error, error_type=kind
        )

    def retry_later(self) -> None:
        """The run has acted on the reason of the lease's end: after a person resumed it, another
        lease may be requested."""
        if self._state.end is not None:
            self._state.end = self._state.end.model_copy(
                update={"error_type": FailureKind.TRAINER_STATE_LOST}
            )

    def check(self) -> None:
        """Raise LeaseFailedError if the lease is known to have ended."""
        end = self._state.end
        if end is not None:
            raise LeaseFailedError(
                end.error or "the lease ended", end.error_type or FailureKind.TRAINER_STATE_LOST
            )

    @property
    def interrupted(self) -> bool:
        """Whether the current lease failed while an operation of the step was in flight."""
        return self._interrupted or (self.ended and self._in_flight > 0)

    async def run(
        self,
        activity: Callable[[Any, Any], Any],
        order: Any,
        summary: str,
        *,
        counts: bool = True,
    ) -> Any:
        """Execute a mutation on the holder, once.

        counts: whether a lease that fails meanwhile makes the step suspect; false in a recovery.

        Raises:
            LeaseFailedError: the lease ended, or the mutation's result is in doubt, for the trainer
                or for the run's folder.
            ActivityError: the request was refused, and the trainer's state is untouched.
        """
        self.check()
        grant = self._state.grant
        assert grant is not None
        async with self._slots:
            self.check()
            if self._state.grant is not grant:
                # The run requested another session meanwhile.
                raise LeaseFailedError("the lease ended", FailureKind.TRAINER_STATE_LOST)
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
                await workflow.wait_condition(lambda: mutation.done() or self.ended)
            finally:
                self._in_flight -= counts
        if not mutation.done():
            self._interrupt(grant.lease_key, counts)
            mutation.add_done_callback(consume_error)
            mutation.cancel()
            self.check()
        try:
            return await mutation
        except ActivityError as error:
            if _is_refused(error.cause):
                raise
            self._interrupt(grant.lease_key, counts and not _never_started(error.cause))
            raise _failure_of(error.cause) from error

    def _interrupt(self, lease: LeaseKey, in_flight: bool) -> None:
        if lease == self._run.lease_key:
            self._interrupted = self._interrupted or in_flight

    async def release(self) -> None:
        """Release the session; waits until that is done, for RELEASE_TIMEOUT at most."""
        if self._state.lease_epoch == 0 or self.ended:
            return
        try:
            await workflow.get_external_workflow_handle(self.workflow_id).signal("release")
            await workflow.wait_condition(lambda: self.ended, timeout=RELEASE_TIMEOUT)
        except (ApplicationError, builtins.TimeoutError) as error:
            workflow.logger.warning("lease %s wasn't released: %s", self._run.lease_key.text, error)

    async def abandon(self, error: LeaseFailedError) -> None:
        """The lease is in doubt: the run sends it nothing more. Its holder, if it still lives, may
        close the session."""
        if self._state.lease_epoch == 0 or self.ended:
            return
        self._end(str(error), error.kind)
        with contextlib.suppress(ApplicationError):
            await workflow.get_external_workflow_handle(self.workflow_id).signal("release")

    @property
    def workflow_id(self) -> str:
        return f"{self._run.run.id}/lease-{self._run.lease_key.text}"

    @property
    def awaited_id(self) -> str | None:
        """Of the lease in force: a check must find its workflow running."""
        missing = self._state.lease_epoch == 0 or self.ended or self._starting
        return None if missing else self.workflow_id


def _provisioning(config: RunConfig) -> ProvisioningWait | None:
    """What a lease of dedicated training may wait for before its session."""
    if not config.dedicated:
        return None
    wish = config.trainer_provisioning
    return ProvisioningWait(pending_timeout=wish.pending_timeout, ready_timeout=wish.ready_timeout)


def _is_refused(cause: BaseException | None) -> bool:
    """Whether a mutation failed with nothing in doubt."""
    ended = {FailureKind.TRAINER_STATE_LOST, FailureKind.TRAINER_FAILED, *LEASE_CLOSED}
    return isinstance(cause, ApplicationError) and cause.type not in ended


def _never_started(cause: BaseException | None) -> bool:
    """Whether no worker started the mutation before its timeout."""
    return isinstance(cause, TimeoutError) and cause.type == TimeoutType.SCHEDULE_TO_START


def _failure_of(cause: BaseException | None) -> LeaseFailedError:
    """Any other failure of a mutation: the session's state is lost or in doubt."""
    if isinstance(cause, TimeoutError):
        return LeaseFailedError(
            f"{cause.message}: its outcome is in doubt", FailureKind.TRAINER_STATE_LOST
        )
    if isinstance(cause, ApplicationError) and cause.type in {
        FailureKind.TRAINER_FAILED,
        *LEASE_CLOSED,
    }:
        return LeaseFailedError(cause.message, str(cause.type))
    return LeaseFailedError(getattr(cause, "message", str(cause)), FailureKind.TRAINER_STATE_LOST)


def consume_error(future: "asyncio.Future[Any]") -> None:
    """Retrieve an error that nothing awaits any more, so that asyncio doesn't log it."""
    if not future.cancelled():
        future.exception()
