"""A dedicated training session: a model on the run's own trainer job, served by its deployment.

What it has in common with a serverless session it inherits. Owns what differs: where the session
is opened, the fence against earlier holders, and publication by hotload. The job and the deployment
are there already (jobs.py).
"""

import asyncio
import logging
import threading
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

from everburn.config import RunConfig
from everburn.records.ids import RunRef
from everburn.records.ledger import AdamParams
from everburn.records.provisioning import ResourceRecord, find_resources
from everburn.records.store import ArtifactStore, StoreError, when_there_is_space
from everburn.trainers.attached_job import (
    begins_as_found,
    require_base_model,
    require_nothing_saved,
)
from everburn.trainers.backends import api_key, api_root
from everburn.trainers.errors import describe, translated
from everburn.trainers.fencing import Holder, earlier_holders, record_holder
from everburn.trainers.guards import check_capabilities
from everburn.trainers.hotload import Hotloader, Serving
from everburn.trainers.protocol import (
    Snapshot,
    TrainerCapacityError,
    TrainerClosedError,
    TrainerError,
    TrainerRejectedError,
    TrainerStateLostError,
    TrainerUnavailableError,
    TrainerUnfitError,
)
from everburn.trainers.serverless import (
    OPEN_TIMEOUT,
    RESULT_TIMEOUT,
    UNLOAD_TIMEOUT,
    ServerlessTrainer,
    listed,
    open_service,
)
from everburn.trainers.session_opening import opened
from everburn.usercode.threads import in_thread

if TYPE_CHECKING:
    from fireworks.training.sdk import FiretitanServiceClient, FiretitanTrainingClient
    from fireworks.training.sdk.fireworks_client import FireworksClient

log = logging.getLogger(__name__)

SHUT_OUT_TIMEOUT = 60.0
"""Seconds for an earlier holder's model to be unloaded, before its lease waits outside."""
LOOK_TIMEOUT = 10.0
"""Seconds for the deployment to tell a probe what it serves. The SDK asks for minutes."""
NO_STEP = AdamParams(
    learning_rate=0.0,
    beta1=0.999999,
    beta2=0.999999,
    eps=1e-8,
    weight_decay=0.0,
    grad_clip_norm=0.0,
    normalization="none",
)
"""Consumes accumulated gradients and leaves weights as they are. To Adam's moments it adds a
millionth of the gradient, and to its count of steps one."""


class DedicatedTrainer(ServerlessTrainer):
    """The Trainer protocol over one SDK training client on a trainer job."""

    def __init__(
        self,
        service: "FiretitanServiceClient",
        client: "FiretitanTrainingClient",
        config: RunConfig,
        resources: ResourceRecord,
    ) -> None:
        super().__init__(service, client, config)
        self._job = resources.job_id
        self._hotloader = Hotloader(config, resources.deployment_id)
        self._handle: str | None = None
        self._served: str | None = None
        """Identity of the snapshot that the deployment must serve."""
        self._publishing = False
        self._looking: asyncio.Future[Serving] | None = None
        self._given_up = threading.Event()
        """Set when whoever comes next may be at the deployment."""

    @classmethod
    async def open_for(cls, run: RunRef, config: RunConfig, epoch: int) -> "DedicatedTrainer":
        """A new session on the run's job, which no earlier holder has a hand in.

        Raises:
            TrainerCapacityError: an earlier holder's model still finishes an operation.
            TrainerUnavailableError: no job, it or the deployment doesn't answer, or an earlier
                holder's model can't be unloaded.
            TrainerUnfitError: the run would begin with what others have left on the job.
            StoreError
        """
        store = ArtifactStore.of(run)
        resources = await asyncio.to_thread(find_resources, store)
        if resources is None:
            raise TrainerUnavailableError(f"run {run.id} has no trainer job yet")
        opening = asyncio.to_thread(cls._open_for, store, config, epoch, resources)
        try:
            trainer = await opened(opening, OPEN_TIMEOUT)
        except TimeoutError:
            raise TrainerUnavailableError(
                f"no session on trainer job {resources.job_id} within {OPEN_TIMEOUT:g} s"
            ) from None
        holder = Holder(
            epoch=epoch, job_id=resources.job_id, model_id=str(trainer._client.model_id)
        )
        try:
            await when_there_is_space(record_holder, store, holder)
            if await asyncio.to_thread(begins_as_found, store, config, resources):
                await require_base_model(trainer, trainer._hotloader, config, resources.job_id)
                await trainer._drop_gradients()
        except (Exception, asyncio.CancelledError) as error:
            await trainer.close()
            if isinstance(error, TrainerStateLostError):
                # There is no state yet that could be lost: the next attempt may go better.
                raise TrainerUnavailableError(str(error)) from error
            raise
        return trainer

    @classmethod
    def _open_for(
        cls, store: ArtifactStore, config: RunConfig, epoch: int, resources: ResourceRecord
    ) -> "DedicatedTrainer":
        service, client = cls._connect(store, config, resources, epoch)
        trainer = cls(service, client, config, resources)
        try:
            check_capabilities(config, client)
        except TrainerUnfitError:
            trainer._close()
            raise
        return trainer

    @classmethod
    def _connect(
        cls, store: ArtifactStore, config: RunConfig, resources: ResourceRecord, epoch: int
    ) -> "tuple[FiretitanServiceClient, FiretitanTrainingClient]":
        from fireworks.training.sdk import TrainerJobManager

        service = None
        earlier = earlier_holders(store, resources.job_id, epoch)
        try:
            key = api_key(config)
            if not earlier and begins_as_found(store, config, resources):
                require_nothing_saved(config, resources.job_id)
            with TrainerJobManager(api_key=key, base_url=api_root(config)) as jobs:
                # A look: the job was ready a moment ago.
                endpoint = jobs.wait_for_ready(
                    resources.job_id, poll_interval_s=0.1, timeout_s=5, pending_timeout_s=5
                )
            service = open_service(endpoint.base_url, key)
            for holder in earlier:
                _shut_out(service, holder, config, resources, store)
            client = service.create_training_client(
                base_model=config.base_model,
                lora_rank=config.lora_rank,
                lora_alpha=config.lora_alpha,
                seed=config.seed,
            )
        except Exception as error:
            if service is not None:
                service.close()
            if isinstance(error, TrainerError | StoreError):
                raise
            raise translated(
                error,
                f"no training session on trainer job {resources.job_id}",
                config.api_key_env,
                opening=True,
            ) from error
        return service, client

    @property
    def session(self) -> str:
        return f"{self._job}/{self._service.holder.get_session_id()}"

    async def load_checkpoint(self, path: str) -> None:
        await self._drop_gradients()
        await super().load_checkpoint(path)

    async def _drop_gradients(self) -> None:
        """Whatever is accumulated, by whomever: loading a state may leave it there. Where a state
        is loaded next, it brings its own moments and count."""
        self._tally.lose_count()
        try:
            await self.optim_step(NO_STEP)
        except TrainerRejectedError as error:
            log.debug("no gradients to drop: %s", error)
        self._tally.clear()

    async def publish(self, name: str) -> Snapshot:
        try:
            return await super().publish(name)
        except (Exception, asyncio.CancelledError):
            self._given_up.set()  # its thread may go on
            raise

    def _publish_timeout(self) -> float:
        return super()._publish_timeout() + self._config.deployment_resource.hotload_timeout

    def _publish(self, name: str) -> Snapshot:
        """Save, load onto the deployment, and see that it is served.

        Full parameters travel whole once per session, then as differences.
        """
        delta = not self._config.lora_rank and self._served is not None
        previous = self._served if delta else None
        self._publishing = True
        try:
            with self._translated("save_weights_for_sampler"):
                saved = self._client.save_weights_for_sampler_ext(
                    name, checkpoint_type="delta" if delta else "base"
                )
            timeout = self._config.deployment_resource.hotload_timeout
            self._hotloader.load(saved.snapshot_name, previous, timeout, self._given_up.is_set)
            self._served = saved.snapshot_name
            if self._handle is None:
                self._handle = self._hotloader.sampler_handle()
        finally:
            self._publishing = False
        return Snapshot(path=saved.snapshot_name, handle=self._handle, shared=True)

    def _promotable(self, control: "FireworksClient", snapshot: str) -> str:
        """By the job's list. What was published as a difference is exported whole first, and an
        adapter that is to become a model by itself with the base model that it changes."""
        row = listed(control.list_checkpoints(self._job), snapshot)
        if self._config.output_merged or not row.get("promotable"):
            whole = self._client.save_weights_for_sampler_ext(
                f"whole-{uuid.uuid4().hex[:8]}",
                checkpoint_type="merged_base" if self._config.output_merged else "base",
            )
            row = listed(control.list_checkpoints(self._job), whole.snapshot_name)
        return str(row["name"])

    def _ask_promotion(
        self, control: "FireworksClient", name: str, model_id: str
    ) -> dict[str, Any]:
        return dict(
            control.promote_checkpoint(
                name=name, output_model_id=model_id, base_model=self._config.base_model
            )
        )

    async def probe(self) -> None:
        """Return if the session lives and the deployment serves its snapshot: an earlier holder
        whose last call was slow may have put its own in the place of it."""
        served = self._served
        if served is None or self._publishing:
            await super().probe()
            return
        _, found = await asyncio.gather(super().probe(), self._look(served))
        if found is None or self._publishing or self._served != served or not found.ready:
            return
        if found.identity != served:
            raise TrainerStateLostError(
                f"deployment {self._hotloader.deployment_id} serves "
                f"{found.identity or 'the base model'}, not {served}"
            )

    async def _look(self, served: str) -> Serving | None:
        """What the deployment serves; None where it doesn't say. That puts nothing in doubt, and
        the next look will tell."""
        if self._looking is not None and not self._looking.done():
            return None
        # On a thread of its own: the pool's few would all wait for a deployment that is down.
        look = in_thread(partial(self._hotloader.serving, served))
        self._looking = asyncio.ensure_future(look)
        try:
            return await asyncio.wait_for(asyncio.shield(self._looking), LOOK_TIMEOUT)
        except (TimeoutError, TrainerStateLostError) as error:
            log.warning("whether %s is served can't be told now: %s", served, describe(error))
            return None

    async def close(self) -> None:
        self._given_up.set()
        await super().close()

    def _close(self) -> None:
        try:
            self._client.unload_model().result(timeout=UNLOAD_TIMEOUT)
        except Exception as error:
            # The job may be gone already; if it isn't, the next holder unloads the model.
            log.info("unloading %s: %s", self._client.model_id, describe(error))
        try:
            self._service.close()
        except Exception as error:
            log.info("closing the client of %s: %s", self._job, describe(error))


def _shut_out(
    service: "FiretitanServiceClient",
    holder: Holder,
    config: RunConfig,
    resources: ResourceRecord,
    store: ArtifactStore,
) -> None:
    """See that an earlier holder has no hand in what is trained from now on.

    Its running operation is waited for, over several leases if need be. Where unloading is refused,
    or nothing can take so long any more, the run's own job is deleted: no model outlives it, and
    the next lease gets another job.

    Raises:
        TrainerCapacityError: it still finishes an operation. Worth waiting for.
        TrainerUnavailableError: its model can't be unloaded, and that matters.
        TrainerClosedError: the account may not train.
    """
    asked = holder.unload_asked or time.time()
    what = f"model {holder.model_id} of an earlier lease isn't unloaded"
    try:
        _unload(service, holder)
        return
    except Exception as error:
        if config.lora_rank:  # an adapter of its own: it is only in the way
            log.warning("%s: %s", what, describe(error))
            return
        reason = translated(error, what, config.api_key_env, opening=True)
        if isinstance(reason, TrainerClosedError):
            raise reason from error
        refused = isinstance(reason, TrainerRejectedError)
        if not refused and time.time() - asked < RESULT_TIMEOUT:
            record_holder(store, holder.model_copy(update={"unload_asked": asked}))
            if isinstance(error, TimeoutError):
                reason = TrainerCapacityError(f"{what}: it still finishes an operation")
            raise reason from error
        if resources.own_job:
            _delete_job(config, resources.job_id, reason)
        raise TrainerUnavailableError(str(reason)) from error


def _delete_job(config: RunConfig, job_id: str, reason: TrainerError) -> None:
    from fireworks.training.sdk import TrainerJobManager

    log.warning("job %s is replaced: %s", job_id, reason)
    with TrainerJobManager(api_key=api_key(config), base_url=api_root(config)) as jobs:
        jobs.delete(job_id)


def _unload(service: "FiretitanServiceClient", holder: Holder) -> None:
    """End a model that somebody else may still think to hold: from then on its requests are
    refused.

    Raises:
        TimeoutError: an operation of its may still run.
        Exception: of the SDK's; it may still live.
    """
    from fireworks.training.sdk import APIStatusError, FiretitanTrainingClient

    client = FiretitanTrainingClient(
        holder=service.holder, model_seq_id=0, model_id=holder.model_id
    )
    try:
        client.unload_model().result(timeout=SHUT_OUT_TIMEOUT)
    except APIStatusError as error:
        if error.status_code not in (404, 410):  # gone already, or its process is
            raise
