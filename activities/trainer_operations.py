"""The operations of a lease, each with its name, its key and its effect.

A method decorated with `operation` is an activity of LeaseContract that is executed once per key.
Reads and writes of the run's folder are retried: a store outage ends no lease. Doesn't own single
flight and order (everburn/trainers/lease.py) or the holding of leases (trainer.py).
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, TypeVar

from temporalio import activity

from activities.contracts import LeaseContract
from activities.failure_types import application_error
from activities.messages import (
    LoadAdapter,
    LoadCheckpoint,
    OptimStep,
    OptimStepped,
    PrepareBatch,
    Promote,
    Promoted,
    Publish,
    Published,
    ReplayStep,
    SaveCheckpoint,
    Saved,
    SubmitGroups,
    Submitted,
)
from everburn.config import RunConfig
from everburn.learning.batch import prepare_batch
from everburn.learning.datums import Datum
from everburn.learning.diagnostics import policy_distance
from everburn.learning.reported import record_reported
from everburn.learning.submissions import prepare_submission
from everburn.records.checkpoints import Checkpoint, record_checkpoint
from everburn.records.ids import RunRef
from everburn.records.ledger import PreparedBatch, read_entry
from everburn.records.publications import Publication, publish
from everburn.records.replay import replay_step
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore, StoreError, through_outages
from everburn.trainers.fencing import check_fingerprint, record_fingerprint
from everburn.trainers.guards import (
    require_finite_gradients,
    require_finite_logprobs,
    require_finite_metrics,
)
from everburn.trainers.lease import Lease, OperationKey
from everburn.trainers.probe import check_served, recorded_completion
from everburn.trainers.protocol import TrainerClosedError, TrainerStateLostError
from everburn.usercode.limits import LimitedLoop

O = TypeVar("O")  # noqa: E741
R = TypeVar("R")
_Activity = Callable[["LeaseOperations", O], Coroutine[Any, Any, R]]


def operation(
    key: Callable[[Any], tuple[int, int | str]],
) -> Callable[[_Activity[O, R]], _Activity[O, R]]:
    """Make a method an activity that is executed once per lease and key.

    key: the step of an order, and its identity within the step.
    """

    def decorated(method: _Activity[O, R]) -> _Activity[O, R]:
        @activity.defn
        @wraps(method)
        async def once(self: "LeaseOperations", order: Any) -> R:
            step, part = key(order)
            return await self.lease.once(
                order.lease.lease_key,
                OperationKey(step, method.__name__, part),
                lambda: method(self, order),
            )

        return once

    return decorated


class LeaseOperations(LeaseContract):
    """batch_loop: returns the loop on which the run's `prepare_batch` runs."""

    def __init__(self, lease: Lease, run: RunRef, batch_loop: Callable[[], LimitedLoop]) -> None:
        self.lease = lease
        self._run = run
        self._store = ArtifactStore.of(run)
        self._batch_loop = batch_loop

    @operation(lambda order: (order.step, 0))
    async def prepare_batch(self, order: PrepareBatch) -> PreparedBatch:
        entrypoint = (await self._config()).prepare_batch
        assert entrypoint is not None
        loop = asyncio.get_running_loop()

        async def forward(sequences: list[list[int]]) -> list[list[float]]:
            logprobs = await self.lease.trainer.forward(sequences)
            return require_finite_logprobs("forward", logprobs)

        async def score(sequences: list[list[int]]) -> list[list[float]]:
            # Called on the user code's loop; the trainer belongs to this one.
            asked = asyncio.run_coroutine_threadsafe(forward(sequences), loop)
            return await asyncio.wrap_future(asked)

        try:
            return await prepare_batch(
                self._run, order.step, order.groups, entrypoint, score, self._batch_loop()
            )
        except (TrainerStateLostError, TrainerClosedError, StoreError):
            raise
        except Exception as error:
            where = f"run {self._run.id} · step {order.step} · {entrypoint.name}"
            raise application_error(error, where=where) from error

    @operation(lambda order: (order.step, order.submission))
    async def forward_backward(self, order: SubmitGroups) -> Submitted:
        config = await self._config()
        datums = await self._datums(order)
        async with self.lease.turn(order.step, order.submission):
            sent = self.lease.trainer.forward_backward(datums, config.loss, config.loss_config)
        gradients = require_finite_gradients(await sent)
        distance = policy_distance(datums, gradients.logprobs, config.clip)
        await through_outages(
            record_reported,
            self._store,
            order.step,
            order.submission,
            self.lease.key,
            distance.tokens,
            gradients.metrics,
        )
        return Submitted(
            datums=len(datums),
            loss_sum=gradients.metrics.get("loss:sum"),
            total_tokens=gradients.metrics.get("total_tokens:sum"),
            distance=distance,
            loss_metrics=gradients.loss_metrics,
        )

    @operation(lambda order: (order.step, 0))
    async def optim_step(self, order: OptimStep) -> OptimStepped:
        reported = await self.lease.trainer.optim_step(order.adam)
        return OptimStepped(metrics=dict(require_finite_metrics("optim_step", reported)))

    @operation(lambda order: (order.version, 0))
    async def publish(self, order: Publish) -> Published:
        started = time.monotonic()
        config, lease, trainer = await self._config(), self.lease.key, self.lease.trainer
        if not order.current and config.dedicated:
            # A deployment serves one version: rollouts of older versions continue on it.
            return Published(snapshot="", seconds=0.0)
        recorded = asyncio.create_task(
            through_outages(recorded_completion, self._store, order.version, lease)
        )
        snapshot = await trainer.publish(f"policy-{order.version:04d}-e{lease.text}")
        gap = await check_served(trainer, snapshot, *await recorded, config.served_tolerance)
        publication = Publication(
            version=order.version,
            incarnation=lease.incarnation,
            lease_epoch=lease.lease_epoch,
            snapshot=snapshot.path,
            handle=snapshot.handle,
            shared=snapshot.shared,
        )
        await through_outages(partial(publish, current=order.current), self._store, publication)
        return Published(snapshot=snapshot.path, seconds=time.monotonic() - started, gap=gap)

    @operation(lambda order: (order.step, order.name))
    async def save_checkpoint(self, order: SaveCheckpoint) -> Saved:
        config = await self._config()
        started = time.monotonic()
        path = await self.lease.trainer.save_checkpoint(order.name)
        checkpoint = Checkpoint(
            step=order.step,
            version=order.version,
            path=path,
            incarnation=self.lease.key.incarnation,
            lease_epoch=self.lease.key.lease_epoch,
            base_model=config.base_model,
            lora_rank=config.lora_rank,
            adapter_seed=config.seed,
        )
        if config.dedicated:
            await record_fingerprint(self._store, self.lease.trainer, path)
        await through_outages(record_checkpoint, self._store, checkpoint)
        return Saved(path=path, seconds=time.monotonic() - started)

    @operation(lambda order: (order.step, order.path))
    async def load_checkpoint(self, order: LoadCheckpoint) -> None:
        config = await self._config()
        await self.lease.trainer.load_checkpoint(order.path)
        if config.dedicated:
            await check_fingerprint(self._store, self.lease.trainer, order.path)

    @operation(lambda order: (0, order.path))
    async def load_adapter(self, order: LoadAdapter) -> None:
        await self.lease.trainer.load_adapter(order.path)

    @operation(lambda order: (order.version, order.attempt))
    async def promote(self, order: Promote) -> Promoted:
        trainer = self.lease.trainer
        model = await trainer.promote(order.snapshot, order.model_id, again=order.again)
        return Promoted(model=model)

    @operation(lambda order: (order.step, 0))
    async def replay_step(self, order: ReplayStep) -> None:
        entry = await through_outages(read_entry, self._store, order.step)
        await replay_step(self._store, self.lease.trainer, entry)

    async def _config(self) -> RunConfig:
        return await through_outages(stored_config, self._run)

    async def _datums(self, order: SubmitGroups) -> list[Datum]:
        """Record the submission's manifest, and build its datums."""
        return await through_outages(
            prepare_submission,
            self._store,
            order.step,
            order.submission,
            self.lease.key,
            order.groups,
            order.prepared,
        )
