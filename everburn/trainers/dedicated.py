"""A dedicated training session: a model on a trainer job, served by a deployment.

Owns the differences from a serverless session: opening on the job, fencing against earlier lease
holders, and publication by hotload. Doesn't own the job and the deployment (jobs.py).
"""

import asyncio
import logging
import threading
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

from everburn.config import RunConfig
from everburn.records.ids import LeaseKey, RunRef
from everburn.records.ledger import AdamParams
from everburn.records.provisioning import ProvisioningRecord, find_provisioning
from everburn.records.store import ArtifactStore, StoreError, when_there_is_space
from everburn.trainers.attached_job import (
    require_base_model,
    require_no_checkpoints,
    starts_from_job_state,
)
from everburn.trainers.backends import api_key, api_root
from everburn.trainers.errors import describe, translated
from everburn.trainers.fencing import Holder, earlier_holders, record_holder
from everburn.trainers.guards import GradientCount, check_capabilities
from everburn.trainers.hotload import Hotloader, ServingStatus
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
    close_quietly,
    find_row,
    open_service,
)
from everburn.trainers.session_opening import wait_for_session
from everburn.usercode.threads import in_thread

if TYPE_CHECKING:
    from fireworks.training.sdk import FiretitanServiceClient, FiretitanTrainingClient
    from fireworks.training.sdk.fireworks_client import FireworksClient

log = logging.getLogger(__name__)

FENCE_TIMEOUT = 60.0
"""Seconds to wait for the unloading of an earlier holder's model; then the lease is retried."""
POLL_TIMEOUT = 10.0
"""Seconds to wait for a deployment's status in a probe. The SDK retries for minutes."""
NO_STEP = AdamParams(
    learning_rate=0.0,
    beta1=0.999999,
    beta2=0.999999,
    eps=1e-8,
    weight_decay=0.0,
    grad_clip_norm=0.0,
    normalization="none",
)
"""Consumes accumulated gradients without changing weights. Adds a millionth of the gradient to
Adam's moments, and one to its step count."""


class DedicatedTrainer(ServerlessTrainer):
    """The Trainer protocol over one SDK training client on a trainer job."""

    def __init__(
        self,
        service: "FiretitanServiceClient",
        client: "FiretitanTrainingClient",
        config: RunConfig,
        record: ProvisioningRecord,
    ) -> None:
        super().__init__(service, client, config)
        self._job = record.job_id
        self._hotloader = Hotloader(config, record.deployment_id)
        self._handle: str | None = None
        self._served: str | None = None
        """Identity of the snapshot that the deployment must serve."""
        self._publishing = False
        self._poll: asyncio.Future[ServingStatus] | None = None
        self._abandoned = threading.Event()
        """Set when the next lease holder may use the deployment."""

    @classmethod
    async def open_for(cls, run: RunRef, config: RunConfig, lease: LeaseKey) -> "DedicatedTrainer":
        """A new session on the run's job, not shared with any earlier lease holder.

        Raises:
            TrainerCapacityError: an earlier holder's model is still finishing an operation.
            TrainerUnavailableError: there is no job, the job or the deployment doesn't answer, or
                an earlier holder's model can't be unloaded.
            TrainerUnfitError: the run would start from another's training.
            StoreError
        """
        store = ArtifactStore.of(run)
        record = await asyncio.to_thread(find_provisioning, store)
        if record is None:
            raise TrainerUnavailableError(f"run {run.id} has no trainer job yet")
        opening = asyncio.to_thread(cls._open_for, store, config, lease, record)
        try:
            trainer = await wait_for_session(opening, OPEN_TIMEOUT)
        except TimeoutError:
            raise TrainerUnavailableError(
                f"no session on trainer job {record.job_id} within {OPEN_TIMEOUT:g} s"
            ) from None
        holder = Holder(
            incarnation=lease.incarnation,
            lease_epoch=lease.lease_epoch,
            job_id=record.job_id,
            model_id=str(trainer._client.model_id),
        )
        try:
            await when_there_is_space(record_holder, store, holder)
            if await asyncio.to_thread(starts_from_job_state, store, config, record):
                await require_base_model(trainer, trainer._hotloader, config, record.job_id)
                await trainer._drop_gradients()
        except (Exception, asyncio.CancelledError) as error:
            await trainer.close()
            if isinstance(error, TrainerStateLostError):
                # No state exists yet that could be lost, so the opening may be retried.
                raise TrainerUnavailableError(str(error)) from error
            raise
        return trainer

    @classmethod
    def _open_for(
        cls, store: ArtifactStore, config: RunConfig, lease: LeaseKey, record: ProvisioningRecord
    ) -> "DedicatedTrainer":
        service, client = cls._connect(store, config, record, lease)
        trainer = cls(service, client, config, record)
        try:
            check_capabilities(config, client)
        except TrainerUnfitError:
            trainer._close()
            raise
        return trainer

    @classmethod
    def _connect(
        cls, store: ArtifactStore, config: RunConfig, record: ProvisioningRecord, lease: LeaseKey
    ) -> "tuple[FiretitanServiceClient, FiretitanTrainingClient]":
        from fireworks.training.sdk import TrainerJobManager

        service = None
        earlier = earlier_holders(store, record.job_id, lease)
        try:
            key = api_key(config)
            if not earlier and starts_from_job_state(store, config, record):
                require_no_checkpoints(config, record.job_id)
            with TrainerJobManager(api_key=key, base_url=api_root(config)) as jobs:
                # Short timeouts: the job was ready a moment ago.
                endpoint = jobs.wait_for_ready(
                    record.job_id, poll_interval_s=0.1, timeout_s=5, pending_timeout_s=5
                )
            service = open_service(endpoint.base_url, key)
            for holder in earlier:
                _fence_out(service, holder, config, record, store)
            client = service.create_training_client(
                base_model=config.base_model,
                lora_rank=config.lora_rank,
                lora_alpha=config.lora_alpha,
                seed=config.seed,
            )
        except Exception as error:
            if service is not None:
                close_quietly(service)
            if isinstance(error, TrainerError | StoreError):
                raise
            raise translated(
                error,
                f"no training session on trainer job {record.job_id}",
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
        """Discard all accumulated gradients; loading a state may keep them. A state that is loaded
        next replaces Adam's moments and step count."""
        self._gradient_count.skip()
        try:
            await self.optim_step(NO_STEP)
        except TrainerRejectedError as error:
            log.debug("no gradients to drop: %s", error)
        self._gradient_count = GradientCount()

    async def publish(self, name: str) -> Snapshot:
        try:
            return await super().publish(name)
        except (Exception, asyncio.CancelledError):
            self._abandoned.set()  # the thread may still be running
            raise

    def _publish_timeout(self) -> float:
        return super()._publish_timeout() + self._config.deployment_provisioning.hotload_timeout

    def _publish(self, name: str) -> Snapshot:
        """Save, load onto the deployment, and wait until it is served. Full parameters are sent
        completely once per session, then as deltas."""
        delta = not self._config.lora_rank and self._served is not None
        previous = self._served if delta else None
        self._publishing = True
        try:
            with self._translated("save_weights_for_sampler"):
                saved = self._client.save_weights_for_sampler_ext(
                    name, checkpoint_type="delta" if delta else "base"
                )
            timeout = self._config.deployment_provisioning.hotload_timeout
            self._hotloader.load(saved.snapshot_name, previous, timeout, self._abandoned.is_set)
            self._served = saved.snapshot_name
            if self._handle is None:
                self._handle = self._hotloader.sampler_handle()
        finally:
            self._publishing = False
        return Snapshot(path=saved.snapshot_name, handle=self._handle, shared=True)

    def _promotable(self, control: "FireworksClient", snapshot: str) -> str:
        """The name of a promotable snapshot in the job's list. A delta is exported completely
        first; with output_merged an adapter is merged into its base model."""
        row = find_row(control.list_checkpoints(self._job), snapshot)
        if self._config.output_merged or not row.get("promotable"):
            whole = self._client.save_weights_for_sampler_ext(
                f"whole-{uuid.uuid4().hex[:8]}",
                checkpoint_type="merged_base" if self._config.output_merged else "base",
            )
            row = find_row(control.list_checkpoints(self._job), whole.snapshot_name)
        return str(row["name"])

    def _request_promotion(
        self, control: "FireworksClient", name: str, model_id: str
    ) -> dict[str, Any]:
        return dict(
            control.promote_checkpoint(
                name=name, output_model_id=model_id, base_model=self._config.base_model
            )
        )

    async def probe(self) -> None:
        """Return if the session is alive and the deployment serves its snapshot; a late hotload of
        an earlier holder may have replaced it."""
        served = self._served
        if served is None or self._publishing:
            await super().probe()
            return
        _, status = await asyncio.gather(super().probe(), self._serving_status(served))
        if status is None or self._publishing or self._served != served or not status.ready:
            return
        if status.identity != served:
            raise TrainerStateLostError(
                f"deployment {self._hotloader.deployment_id} serves "
                f"{status.identity or 'the base model'}, not {served}"
            )

    async def _serving_status(self, served: str) -> ServingStatus | None:
        """The deployment's status; None if it doesn't answer, which is no evidence against the
        session."""
        if self._poll is not None and not self._poll.done():
            return None
        # On its own thread: a deployment that is down would block the whole thread pool.
        poll = in_thread(partial(self._hotloader.serving, served))
        self._poll = asyncio.ensure_future(poll)
        try:
            return await asyncio.wait_for(asyncio.shield(self._poll), POLL_TIMEOUT)
        except (TimeoutError, TrainerStateLostError) as error:
            log.warning("can't check whether %s is served: %s", served, describe(error))
            return None

    async def close(self) -> None:
        self._abandoned.set()
        await super().close()

    def _close(self) -> None:
        try:
            self._client.unload_model().result(timeout=UNLOAD_TIMEOUT)
        except Exception as error:
            # The job may be gone; otherwise the next holder unloads the model.
            log.info("unloading %s: %s", self._client.model_id, describe(error))
        close_quietly(self._service)


def _fence_out(
    service: "FiretitanServiceClient",
    holder: Holder,
    config: RunConfig,
    record: ProvisioningRecord,
    store: ArtifactStore,
) -> None:
    """Unload an earlier holder's model, so that it can't change what is trained from now on.

    A running operation is waited for, over several leases if necessary. If unloading is refused, or
    takes longer than any operation can, the run's own job is deleted, and the next lease creates
    another.

    Raises:
        TrainerCapacityError: the model is still finishing an operation.
        TrainerUnavailableError: the model can't be unloaded, and shares weights.
        TrainerClosedError
    """
    requested_at = holder.unload_requested_at or time.time()
    problem = f"model {holder.model_id} of an earlier lease isn't unloaded"
    try:
        _unload(service, holder)
    except Exception as error:
        if config.lora_rank:  # a separate adapter, which can't change this one
            log.warning("%s: %s", problem, describe(error))
            return
        reason = translated(error, problem, config.api_key_env, opening=True)
        if isinstance(reason, TrainerClosedError):
            raise reason from error
        refused = isinstance(reason, TrainerRejectedError)
        if not refused and time.time() - requested_at < RESULT_TIMEOUT:
            record_holder(store, holder.model_copy(update={"unload_requested_at": requested_at}))
            if isinstance(error, TimeoutError):
                reason = TrainerCapacityError(f"{problem}: it is still finishing an operation")
            raise reason from error
        if record.own_job:
            _delete_job(config, record.job_id, reason)
        raise TrainerUnavailableError(str(reason)) from error


def _delete_job(config: RunConfig, job_id: str, reason: TrainerError) -> None:
    from fireworks.training.sdk import TrainerJobManager

    log.warning("replacing job %s: %s", job_id, reason)
    with TrainerJobManager(api_key=api_key(config), base_url=api_root(config)) as jobs:
        jobs.delete(job_id)


def _unload(service: "FiretitanServiceClient", holder: Holder) -> None:
    """Unload a model; the service then refuses its requests.

    Raises:
        TimeoutError: an operation of the model may still be running.
        Exception: from the SDK; the model may still exist.
    """
    from fireworks.training.sdk import APIStatusError, FiretitanTrainingClient

    client = FiretitanTrainingClient(
        holder=service.holder, model_seq_id=0, model_id=holder.model_id
    )
    try:
        client.unload_model().result(timeout=FENCE_TIMEOUT)
    except APIStatusError as error:
        if error.status_code not in (404, 410):  # the model or its process is gone
            raise
