"""Activities that compare what a run waits for with what there is: store and child workflows.

A lost signal, a terminated child or one that died heals here.
"""

import asyncio

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.failure_types import final_errors
from activities.messages import Reconcile, Reconciled, RunLife
from everburn.learning.group import find_group
from everburn.records.ids import GroupKey, GroupResult, group_workflow_id
from everburn.records.run_folder import find_owner
from everburn.records.store import ArtifactStore, StoreError


class ReconciliationActivities:
    def __init__(self, client: Client) -> None:
        self._client = client

    @activity.defn
    async def reconcile(self, order: Reconcile) -> Reconciled:
        """Look up everything that the run waits for."""
        store = ArtifactStore.of(order.run)
        finished: list[GroupResult] = []
        dead: list[GroupKey] = []
        for key in order.groups:
            # In this order: a group that ends meanwhile has left its manifest before.
            is_open = await self._is_open(group_workflow_id(order.run.id, key))
            with final_errors(StoreError):
                manifest = await asyncio.to_thread(find_group, store, key)
            if manifest is not None:
                finished.append(manifest.result)
            elif not is_open:
                dead.append(key)
        return Reconciled(
            finished=finished,
            dead=dead,
            lease_closed=order.lease is not None and not await self._is_open(order.lease),
            evaluation_closed=order.evaluation is not None
            and not await self._is_open(order.evaluation),
        )

    @activity.defn
    async def run_is_open(self, within: RunLife) -> bool:
        """Whether somebody still waits for what a child of the run does."""
        return await goes_on(self._client, within)

    async def _is_open(self, workflow_id: str) -> bool:
        return await is_open(self._client, workflow_id)


async def goes_on(client: Client, within: RunLife) -> bool:
    """Whether a run is open, and still in the life that something was begun in.

    Resumed, it takes over its folder a moment after it has begun; until then it is told from its
    former life by the owner that the folder has.

    Raises:
        RPCError, StoreError: it can't be asked.
    """
    found = await _open_execution(client, within.run.id)
    if found is None:
        return False
    owner = await asyncio.to_thread(find_owner, ArtifactStore.of(within.run))
    if owner is None:
        return True
    chain = found.raw_description.workflow_execution_info.first_run_id
    return owner.chain == chain and owner.life <= within.life


async def is_awaited(client: Client, attempt: activity.Info) -> bool:
    """Whether the server still waits for this attempt at an activity. One that was handed to a
    process which stands still begins when that goes on: long after it was given up, perhaps.

    Raises:
        RPCError: it can't be asked.
    """
    assert attempt.workflow_id is not None
    asker = await _open_execution(client, attempt.workflow_id, attempt.workflow_run_id)
    return asker is not None and any(
        (pending.activity_id, pending.attempt) == (attempt.activity_id, attempt.attempt)
        for pending in asker.raw_description.pending_activities
    )


async def is_open(client: Client, workflow_id: str, run_id: str | None = None) -> bool:
    """Whether a workflow of this id, or this execution of it, is running now."""
    return await _open_execution(client, workflow_id, run_id) is not None


async def _open_execution(
    client: Client, workflow_id: str, run_id: str | None = None
) -> WorkflowExecutionDescription | None:
    try:
        found = await client.get_workflow_handle(workflow_id, run_id=run_id).describe()
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return None
        raise
    return found if found.status == WorkflowExecutionStatus.RUNNING else None
