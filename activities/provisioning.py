"""Activities that look after a run's trainer job and deployment. Each is short: nobody waits in
one.

They run on trainer workers, any of them, and find what there is by the ids in the run's folder.
"""

import asyncio

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError

from activities.failure_types import final_errors
from activities.messages import ProvisioningReadiness
from activities.reconciliation import is_open
from everburn.records.ids import RunRef


class ProvisioningActivities:
    def __init__(self, client: Client) -> None:
        self._client = client

    @activity.defn
    async def advance_provisioning(self, run: RunRef) -> ProvisioningReadiness:
        """Do what can be done now towards a running job and a ready deployment."""
        from everburn.records.run_folder import stored_config
        from everburn.records.store import StoreError, when_there_is_space
        from everburn.secrets import redacted
        from everburn.trainers.jobs import RunProvisioning
        from everburn.trainers.protocol import TrainerCapacityError, TrainerUnavailableError

        if not await self._is_wanted(run):
            return ProvisioningReadiness(stage="unwanted", text="the run has ended")
        with final_errors(TrainerUnavailableError, StoreError):
            config = await asyncio.to_thread(stored_config, run)
            try:
                found = await when_there_is_space(RunProvisioning(run, config).advance)
            except TrainerCapacityError as error:
                return ProvisioningReadiness(stage="pending", text=redacted(str(error)))
        text = redacted(found.text)  # the control plane's words among others
        return ProvisioningReadiness(stage=found.stage, text=text, resumed=found.resumed)

    @activity.defn
    async def clean_up_provisioning(self, run: RunRef, orphaned: bool = False) -> str:
        """Give back what the run made; what it did, in words.

        orphaned: whether it is asked for a run that was found to be gone. One that was resumed
        meanwhile uses what its former life made.

        Raises:
            RPCError: whether it was can't be told.
        """
        from everburn.records.run_folder import stored_config
        from everburn.records.store import StoreError
        from everburn.trainers.jobs import RunProvisioning
        from everburn.trainers.protocol import TrainerError

        if orphaned and await is_open(self._client, run.id):
            return "the run goes on"
        with final_errors(TrainerError, StoreError):
            config = await asyncio.to_thread(stored_config, run)
            return await asyncio.to_thread(RunProvisioning(run, config).clean_up)

    async def _is_wanted(self, run: RunRef) -> bool:
        """Whether the run goes on; while the server can't be asked it is taken to."""
        try:
            return await is_open(self._client, run.id)
        except RPCError:
            return True
