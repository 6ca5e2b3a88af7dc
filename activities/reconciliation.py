"""Activities that compare what a run waits for with the store and its child workflows.

They detect a lost signal, and a child that was terminated or failed.
"""

import asyncio

from temporalio import activity
from temporalio.client import Client

from activities.contracts import ReconciliationContract
from activities.liveness import RunLiveness
from activities.messages import Reconcile, Reconciled, RunIncarnation
from everburn.learning.group import find_group
from everburn.records.ids import GroupKey, GroupResult, group_workflow_id
from everburn.records.store import ArtifactStore


class ReconciliationActivities(ReconciliationContract):
    def __init__(self, client: Client) -> None:
        self._liveness = RunLiveness(client)

    @activity.defn
    async def reconcile(self, order: Reconcile) -> Reconciled:
        store = ArtifactStore.of(order.run)
        finished: list[GroupResult] = []
        dead: list[GroupKey] = []
        for key in order.groups:
            # In this order: a group that ends in between has already written its manifest.
            is_open = await self._liveness.is_open(group_workflow_id(order.run.id, key))
            manifest = await asyncio.to_thread(find_group, store, key)
            if manifest is not None:
                finished.append(manifest.result)
            elif not is_open:
                dead.append(key)
        return Reconciled(
            finished=finished,
            dead=dead,
            lease_closed=await self._is_closed(order.lease),
            evaluation_closed=await self._is_closed(order.evaluation),
        )

    @activity.defn
    async def run_is_open(self, within: RunIncarnation) -> bool:
        return await self._liveness.is_alive(within.run, within.incarnation)

    async def _is_closed(self, workflow_id: str | None) -> bool:
        return workflow_id is not None and not await self._liveness.is_open(workflow_id)
