"""Whether a run is still alive, in the incarnation that requested the work.

A terminated run cancels nothing, and a resumed run restarts its rows, so every worker checks by
itself. Owns these checks of server and run folder, and the cancellation of work whose run is gone.
Doesn't own the end of leases and trainer jobs (trainer.py, provisioning.py).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.messages import RunIncarnation
from everburn.records.ids import RunRef
from everburn.records.run_folder import find_owner
from everburn.records.store import ArtifactStore, StoreError

T = TypeVar("T")

log = logging.getLogger(__name__)

INTERVAL = 5.0
"""Seconds between checks while work for the run is in progress."""
ANSWER_TIMEOUT = 30.0
"""Seconds to wait for the server's answer before a durable write."""


class RunGoneError(RuntimeError):
    """The run was terminated or reset, and perhaps resumed: nothing waits for this work."""


class RunLiveness:
    """The liveness checks of one process."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._works: dict[RunIncarnation, set[asyncio.Future[Any]]] = {}
        self._watches: dict[RunIncarnation, asyncio.Task[None]] = {}

    async def is_alive(self, run: RunRef, incarnation: int | None = None) -> bool:
        """Whether the run is open and, where `incarnation` is given, still in it.

        A resumed run takes over its folder shortly after its start; until then the folder's owner
        names another first execution.

        Raises:
            RPCError, StoreError: the server or the store doesn't answer.
        """
        found = await self._open_execution(run.id)
        if found is None:
            return False
        if incarnation is None:
            return True
        owner = await asyncio.to_thread(find_owner, ArtifactStore.of(run))
        if owner is None:
            return True
        first = found.raw_description.workflow_execution_info.first_run_id
        return owner.first_execution_id == first and owner.incarnation <= incarnation

    async def seems_alive(self, run: RunRef, incarnation: int | None = None) -> bool:
        """`is_alive`, or true while the server or the store doesn't answer."""
        try:
            return await self.is_alive(run, incarnation)
        except (RPCError, StoreError) as error:
            log.warning("can't check whether run %s is alive: %s", run.id, error)
            return True

    async def is_open(self, workflow_id: str, execution: str | None = None) -> bool:
        """Whether the workflow, or the given execution of it, is running."""
        return await self._open_execution(workflow_id, execution) is not None

    async def awaits(self, attempt: activity.Info) -> bool:
        """Whether the server still waits for this activity attempt; true while it doesn't answer.

        A suspended process may start an attempt long after it timed out.
        """
        assert attempt.workflow_id is not None
        try:
            caller = await self._open_execution(attempt.workflow_id, attempt.workflow_run_id)
        except RPCError as error:
            log.warning("can't check an attempt for %s: %s", attempt.workflow_id, error)
            return True
        return caller is not None and any(
            (pending.activity_id, pending.attempt) == (attempt.activity_id, attempt.attempt)
            for pending in caller.raw_description.pending_activities
        )

    async def while_alive(self, within: RunIncarnation, work: Awaitable[T]) -> T:
        """Await an activity's work, which is cancelled once the run is gone.

        Raises:
            RunGoneError: the work was cancelled because the run is gone.
        """
        task = asyncio.ensure_future(work)
        works = self._works.setdefault(within, set())
        works.add(task)
        if within not in self._watches:
            self._watches[within] = asyncio.create_task(self._watch(within))
        try:
            return await task
        except asyncio.CancelledError:
            if task in works:
                raise
            raise RunGoneError(f"run {within.run.id} is gone; its work here is cancelled") from None
        finally:
            works.discard(task)

    def last_check(self, within: RunIncarnation) -> Callable[[], None]:
        """Return a check that a thread of the current activity calls right before a durable write.

        The check raises:
            RunGoneError: the activity's workflow execution or the run is gone.
            RPCError, StoreError, TimeoutError: there is no answer.
        """
        info, loop = activity.info(), asyncio.get_running_loop()
        caller, execution = info.workflow_id, info.workflow_run_id
        assert caller is not None

        async def is_awaited() -> bool:
            return await self.is_open(caller, execution) and await self.is_alive(
                within.run, within.incarnation
            )

        def check() -> None:
            answer = asyncio.run_coroutine_threadsafe(is_awaited(), loop)
            if not answer.result(ANSWER_TIMEOUT):
                raise RunGoneError(f"nothing waits for {caller}: nothing is written for it")

        return check

    async def _watch(self, within: RunIncarnation) -> None:
        """Check until an interval ends without work: work may pause between two checks."""
        works = self._works[within]
        try:
            while True:
                await asyncio.sleep(INTERVAL)
                if not works:
                    return
                alive = await self.seems_alive(within.run, within.incarnation)
                while works and not alive:
                    works.pop().cancel()
        finally:
            del self._watches[within], self._works[within]

    async def _open_execution(
        self, workflow_id: str, execution: str | None = None
    ) -> WorkflowExecutionDescription | None:
        try:
            handle = self._client.get_workflow_handle(workflow_id, run_id=execution)
            found = await handle.describe()
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return None
            raise
        return found if found.status == WorkflowExecutionStatus.RUNNING else None
