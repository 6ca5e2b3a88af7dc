"""Activities that manage a run's trainer job and deployment. Each is short: none waits.

Any trainer worker can run them: the ids of job and deployment are in the run's folder.
"""

import asyncio

from temporalio import activity
from temporalio.client import Client

from activities.contracts import ProvisioningContract
from activities.failure_types import application_error
from activities.liveness import RunLiveness
from activities.messages import ProvisioningReadiness
from everburn.records.ids import RunRef
from everburn.records.run_folder import stored_config
from everburn.records.store import when_there_is_space
from everburn.secrets import redacted
from everburn.trainers.jobs import RunProvisioning
from everburn.trainers.protocol import TrainerCapacityError, TrainerError


class ProvisioningActivities(ProvisioningContract):
    def __init__(self, client: Client) -> None:
        self._liveness = RunLiveness(client)

    @activity.defn
    async def advance_provisioning(self, run: RunRef) -> ProvisioningReadiness:
        if not await self._liveness.seems_alive(run):
            return ProvisioningReadiness(stage="unwanted", text="the run has ended")
        config = await asyncio.to_thread(stored_config, run)
        try:
            found = await when_there_is_space(RunProvisioning(run, config).advance)
        except TrainerCapacityError as error:
            return ProvisioningReadiness(stage="pending", text=redacted(str(error)))
        text = redacted(found.text)  # may quote the control plane
        return ProvisioningReadiness(stage=found.stage, text=text, resumed=found.resumed)

    @activity.defn
    async def clean_up_provisioning(self, run: RunRef, orphaned: bool = False) -> str:
        if orphaned and await self._liveness.is_alive(run):
            return "the run continues"
        config = await asyncio.to_thread(stored_config, run)
        try:
            return await asyncio.to_thread(RunProvisioning(run, config).clean_up)
        except TrainerError as error:
            # What remains costs money, so even a refused key is retried.
            raise application_error(error, retryable=True) from error
