"""Activities of trainer workers: acquiring a lease, holding it, and every mutation under it.

A lease lives in the process that acquired it and is addressed by a task queue of its own, on
which that process starts a second worker. Doesn't own what an operation does
(trainer_operations.py).
"""

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities import trainer_operations
from activities.failure_types import (
    TRAINER_FAILED,
    TRAINER_STATE_LOST,
    application_error,
    final_errors,
)
from activities.heartbeats import THROTTLE
from activities.imports import import_all
from activities.messages import (
    AcquireLease,
    LeaseGrant,
    LeaseRef,
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
from activities.reconciliation import is_awaited, is_open
from everburn.records.ledger import PreparedBatch
from everburn.trainers.session_opening import Openings, wait_for_session

if TYPE_CHECKING:
    from everburn.config import RunConfig
    from everburn.records.ids import RunRef
    from everburn.records.run_folder import Owner
    from everburn.trainers.lease import Lease
    from everburn.trainers.protocol import Trainer
    from everburn.usercode.limits import LimitedLoop

    OpenTrainer = Callable[[LeaseRef, RunConfig], Awaitable[Trainer]]

T = TypeVar("T")

log = logging.getLogger(__name__)

PROBE_INTERVAL = 5.0
"""Seconds between looks whether the session still lives, also while nothing trains."""
PROBE_TIMEOUT = 30.0
"""Seconds; a server under load answers late, a dead one never."""
CLAIM_TIMEOUT = 30.0
"""Seconds after which a lease that nobody holds never will be."""
LEASE_GRACE = timedelta(seconds=5)
"""For activities of a released lease to report their results."""
LEASE_SLOTS = 64
"""Activities at once on a lease's queue: more than submissions are ever pending."""
MAX_IDLE_LOOPS = 8
"""Of runs that this process holds no lease of, and may hold one of again."""


@dataclass
class _Held:
    lease: "Lease"
    owner: "Owner | None"
    """The life of the run that took the lease."""
    worker: Worker
    serving: "asyncio.Task[None]"
    expiry: "asyncio.Task[None] | None" = None
    claimed: bool = False
    """Whether the run knows that it has the lease."""
    stopping: "asyncio.Task[None] | None" = None


async def open_session(ref: LeaseRef, config: "RunConfig") -> "Trainer":
    """A session at the run's backend."""
    from everburn.trainers.dedicated import DedicatedTrainer
    from everburn.trainers.serverless import ServerlessTrainer

    if config.dedicated:
        return await DedicatedTrainer.open_for(ref.run, config, ref.epoch)

    return await ServerlessTrainer.open(config)


def preload() -> None:
    """Import what the first lease needs: the SDK, and what makes its requests."""
    import_all(
        "everburn.learning.submissions",
        "everburn.records.replay",
        "everburn.trainers.guards",
        "everburn.trainers.lease",
        "everburn.trainers.serverless",
    )
    from everburn.trainers import sdk

    sdk.load()


class TrainerActivities:
    """The leases of this process."""

    def __init__(self, client: Client, open_trainer: "OpenTrainer" = open_session) -> None:
        self._client = client
        self._open_trainer = open_trainer
        self._held: dict[LeaseRef, _Held] = {}
        self._openings = Openings[LeaseRef, _Held]()
        self._batch_loops: OrderedDict[RunRef, LimitedLoop] = OrderedDict()
        """Of `prepare_batch`, by run: what blocks holds up its own run only. They outlive leases:
        what user code has opened belongs to its loop. The one used last is at the end."""

    @activity.defn
    async def acquire_lease(self, order: AcquireLease) -> LeaseGrant:
        """Open a trainer session, and a task queue that only this process serves."""
        await asyncio.to_thread(preload)
        from everburn.records.store import StoreError
        from everburn.trainers.protocol import TrainerUnavailableError
        from everburn.usercode.entrypoints import worker_name

        ref = LeaseRef(run=order.run, epoch=order.epoch)
        with final_errors(TrainerUnavailableError, StoreError):
            if not await self._is_current_attempt(ref):
                late = RuntimeError(
                    f"this attempt at lease {ref.epoch} was given up before it began"
                )
                raise application_error(late, kind=TRAINER_STATE_LOST)
            # A process that stood still for a while has several attempts at a lease at once.
            held = await self._openings.join(ref, lambda: self._find_or_open(ref))
        return LeaseGrant(
            epoch=order.epoch,
            task_queue=held.worker.task_queue,
            session=held.lease.trainer.session,
            holder=worker_name(),
        )

    @activity.defn
    async def hold_lease(self, ref: LeaseRef) -> None:
        """Stay as long as the session lives; returns at its release, fails when it is lost."""
        from everburn.trainers.protocol import TrainerStateLostError

        lease = self._lease(ref)
        held = self._held[ref]
        held.claimed = True
        try:
            while lease.ended is None:
                await self._probe(lease)
                if not await self._is_wanted(ref, held.owner):
                    # A terminated run can't give its session back.
                    await lease.release()
                await lease.wait_ended(PROBE_INTERVAL)
        except asyncio.CancelledError:
            # This process stood still for too long, and was given up.
            await lease.end(TrainerStateLostError(f"lease {ref.epoch} was given up by its run"))
            raise
        finally:
            self._retire(ref)
        if lease.closed is not None:
            # The run may hear of it here before it does from the operation.
            raise application_error(lease.closed)
        if not lease.released:
            raise application_error(lease.ended, kind=_kind_of(lease.ended))

    @activity.defn
    async def release_lease(self, ref: LeaseRef) -> None:
        """Give the session back, and stop serving its queue."""
        held = self._held.get(ref)
        if held is not None:
            await held.lease.release()
            self._retire(ref)

    @activity.defn
    async def prepare_batch(self, order: PrepareBatch) -> PreparedBatch:
        """Advantages of the sealed batch, by the user's function; found where it has run before."""
        lease = self._lease(order.lease)
        return await self._once(
            lease,
            order.lease,
            order.step,
            "prepare_batch",
            0,
            lambda: self._prepare_batch(lease, order),
        )

    @activity.defn
    async def forward_backward(self, order: SubmitGroups) -> Submitted:
        """Send the gradients of some groups; results of several may be pending together."""
        lease = self._lease(order.lease)
        return await self._once(
            lease,
            order.lease,
            order.step,
            "forward_backward",
            order.part,
            lambda: trainer_operations.submit(lease, order),
        )

    @activity.defn
    async def optim_step(self, order: OptimStep) -> OptimStepped:
        from everburn.trainers.guards import require_finite_metrics

        lease = self._lease(order.lease)

        async def step() -> OptimStepped:
            reported = await lease.trainer.optim_step(order.adam)
            return OptimStepped(metrics=dict(require_finite_metrics("optim_step", reported)))

        return await self._once(lease, order.lease, order.step, "optim_step", 0, step)

    @activity.defn
    async def publish(self, order: Publish) -> Published:
        """Save sampler weights, see that they are served, and record who serves the version."""
        lease = self._lease(order.lease)
        return await self._once(
            lease,
            order.lease,
            order.version,
            "publish",
            0,
            lambda: trainer_operations.publish(lease, order),
        )

    @activity.defn
    async def save_checkpoint(self, order: SaveCheckpoint) -> Saved:
        lease = self._lease(order.lease)
        return await self._once(
            lease,
            order.lease,
            order.step,
            f"save {order.name}",
            0,
            lambda: trainer_operations.save_checkpoint(lease, order),
        )

    @activity.defn
    async def load_checkpoint(self, order: LoadCheckpoint) -> None:
        lease = self._lease(order.lease)
        await self._once(
            lease,
            order.lease,
            order.step,
            f"load {order.path}",
            0,
            lambda: trainer_operations.load_checkpoint(lease, order),
        )

    @activity.defn
    async def load_adapter(self, order: LoadAdapter) -> None:
        lease = self._lease(order.lease)
        await self._once(
            lease,
            order.lease,
            0,
            f"load {order.path}",
            0,
            lambda: lease.trainer.load_adapter(order.path),
        )

    @activity.defn
    async def promote(self, order: Promote) -> Promoted:
        """Make a model of the account from a snapshot, for as long as its session lives."""
        lease = self._lease(order.lease)

        async def promote() -> Promoted:
            name = await lease.trainer.promote(order.snapshot, order.model_id, again=order.again)
            return Promoted(model=name)

        return await self._once(
            lease, order.lease, order.version, "promote", order.attempt, promote
        )

    @activity.defn
    async def replay_step(self, order: ReplayStep) -> None:
        lease = self._lease(order.lease)
        await self._once(
            lease,
            order.lease,
            order.step,
            "replay",
            0,
            lambda: trainer_operations.replay(lease, order),
        )

    async def close(self) -> None:
        """End all leases: the process goes down, and its sessions with it."""
        await self._openings.cancel()
        await asyncio.gather(*(self._end(ref) for ref in list(self._held)))
        for loop in self._batch_loops.values():
            loop.close()

    async def _end(self, ref: LeaseRef) -> None:
        held = self._held[ref]
        if held.stopping is None:
            await held.lease.release()
            self._retire(ref)
        if held.stopping is not None:
            await held.stopping

    async def _find_or_open(self, ref: LeaseRef) -> _Held:
        """The lease that this process holds, or takes now. Not for two at once: they would open two
        sessions, of which the later took the place of the one that is granted."""
        from everburn.records.run_folder import stored_config
        from everburn.trainers.lease import Lease
        from everburn.usercode.entrypoints import resolve

        held = self._held.get(ref)
        if held is not None:
            return held
        owner = await self._owner(ref)
        if not await self._is_wanted(ref, owner):
            gone = RuntimeError(f"run {ref.run.id} has no use for lease {ref.epoch} any more")
            raise application_error(gone, kind=TRAINER_STATE_LOST)
        await self._end_superseded(ref)
        config = await asyncio.to_thread(stored_config, ref.run)
        for entrypoint in config.trainer_entrypoints:
            # They run here, where other modules may be at hand than on a rollout worker.
            await asyncio.to_thread(resolve, entrypoint)
        trainer = await wait_for_session(self._open_trainer(ref, config))
        held = self._serve(Lease(ref.epoch, trainer), owner, lease_queue(ref))
        self._held[ref] = held
        held.expiry = asyncio.create_task(self._expire_unclaimed(ref))
        return held

    async def _prepare_batch(self, lease: "Lease", order: PrepareBatch) -> PreparedBatch:
        from everburn.learning.batch import prepare_batch
        from everburn.records.run_folder import stored_config
        from everburn.records.store import StoreError, through_outages
        from everburn.trainers.protocol import TrainerClosedError, TrainerStateLostError

        run = order.lease.run
        entrypoint = (await through_outages(stored_config, run)).prepare_batch
        assert entrypoint is not None
        score = trainer_operations.scoring(lease, asyncio.get_running_loop())
        try:
            return await prepare_batch(
                run, order.step, order.groups, entrypoint, score, self._batch_loop(run)
            )
        except (TrainerStateLostError, TrainerClosedError, StoreError):
            raise
        except Exception as error:
            where = f"run {run.id} · step {order.step} · {entrypoint.name}"
            raise application_error(error, where=where) from error

    def _batch_loop(self, run: "RunRef") -> "LimitedLoop":
        from everburn.usercode.limits import LimitedLoop

        loop = self._batch_loops.pop(run, None) or LimitedLoop("batches")
        self._batch_loops[run] = loop
        held = {ref.run for ref in self._held}
        idle = [each for each in self._batch_loops if each not in held]
        for each in idle[: max(0, len(idle) - MAX_IDLE_LOOPS)]:
            self._batch_loops.pop(each).close()
        return loop

    async def _end_superseded(self, ref: LeaseRef) -> None:
        """Leases of the same run that this process still holds are of no use any more."""
        from everburn.trainers.protocol import TrainerStateLostError

        superseded = TrainerStateLostError(f"lease {ref.epoch} has taken over")
        for old in [held for held in self._held if held.run == ref.run and held.epoch < ref.epoch]:
            await self._held[old].lease.end(superseded)
            # Its session is closed meanwhile: a service that is gone would hold up the new one.
            self._retire(old)

    async def _expire_unclaimed(self, ref: LeaseRef) -> None:
        """End a lease whose grant nobody received: the activity had been given up meanwhile."""
        await asyncio.sleep(CLAIM_TIMEOUT)
        held = self._held.get(ref)
        if held is not None and not held.claimed:
            log.warning("lease %d of run %s isn't claimed", ref.epoch, ref.run.id)
            await held.lease.release()
            self._retire(ref)

    def _serve(self, lease: "Lease", owner: "Owner | None", queue: str) -> _Held:
        worker = Worker(
            self._client,
            task_queue=queue,
            activities=[
                self.hold_lease,
                self.release_lease,
                self.prepare_batch,
                self.forward_backward,
                self.optim_step,
                self.publish,
                self.save_checkpoint,
                self.load_checkpoint,
                self.load_adapter,
                self.promote,
                self.replay_step,
            ],
            max_concurrent_activities=LEASE_SLOTS,
            max_heartbeat_throttle_interval=THROTTLE,
            graceful_shutdown_timeout=LEASE_GRACE,
        )
        return _Held(lease, owner, worker, asyncio.create_task(worker.run()))

    def _retire(self, ref: LeaseRef) -> None:
        """The lease has ended: stop serving its queue, once what is served now has reported."""
        held = self._held.get(ref)
        if held is not None and held.stopping is None:
            # Not awaited: activities of the very worker that is stopped end with this.
            held.stopping = asyncio.create_task(self._stop_serving(ref))

    async def _stop_serving(self, ref: LeaseRef) -> None:
        held = self._held[ref]
        if held.expiry is not None:
            held.expiry.cancel()
        try:
            await held.worker.shutdown()
            await held.serving
        except Exception as error:
            log.warning("the queue of lease %d of run %s: %s", ref.epoch, ref.run.id, error)
        finally:
            if not held.lease.released:
                # Lost to the run, the session may live on, and cost.
                await held.lease.trainer.close()
            del self._held[ref]

    async def _owner(self, ref: LeaseRef) -> "Owner | None":
        from everburn.records.run_folder import find_owner
        from everburn.records.store import ArtifactStore

        return await asyncio.to_thread(find_owner, ArtifactStore.of(ref.run))

    async def _is_current_attempt(self, ref: LeaseRef) -> bool:
        """Whether this attempt at a lease is the one that counts: on a trainer job, opening a
        session ends the one that another attempt may hold by now."""
        try:
            return await is_awaited(self._client, activity.info())
        except RPCError as error:
            log.warning("can't look after run %s: %s", ref.run.id, error)
            return True

    async def _is_wanted(self, ref: LeaseRef, owner: "Owner | None") -> bool:
        """Whether the run goes on, in the life that asked for the lease and took it; while nobody
        can be asked it is taken to."""
        from everburn.records.store import StoreError

        try:
            now = await self._owner(ref)
            its_own = now == owner and (now is None or now.life <= ref.life)
            return its_own and await is_open(self._client, ref.run.id)
        except (RPCError, StoreError) as error:
            log.warning("can't look after run %s: %s", ref.run.id, error)
            return True

    def _lease(self, ref: LeaseRef) -> "Lease":
        held = self._held.get(ref)
        if held is None:
            raise application_error(
                RuntimeError(f"this process doesn't hold lease {ref.epoch} of run {ref.run.id}"),
                kind=TRAINER_STATE_LOST,
            )
        return held.lease

    async def _probe(self, lease: "Lease") -> None:
        """End the lease where its session is found to be of no use any more."""
        from everburn.trainers.protocol import (
            TrainerClosedError,
            TrainerError,
            TrainerStateLostError,
        )

        try:
            await asyncio.wait_for(lease.trainer.probe(), PROBE_TIMEOUT)
        except TrainerClosedError as error:
            await lease.close_for(error)
        except TrainerError as error:
            # Also a failed answer: it says nothing about the operations in flight.
            await lease.end(TrainerStateLostError(str(error)))
        except TimeoutError:
            await lease.end(
                TrainerStateLostError(f"the session didn't answer within {PROBE_TIMEOUT:g} s")
            )

    async def _once(
        self,
        lease: "Lease",
        ref: LeaseRef,
        step: int,
        operation: str,
        part: int,
        run: Callable[[], Awaitable[T]],
    ) -> T:
        from everburn.records.publications import StaleEpochError
        from everburn.trainers.lease import OperationKey
        from everburn.trainers.protocol import TrainerStateLostError

        with final_errors():
            try:
                return await lease.once(ref.epoch, OperationKey(step, operation, part), run)
            except (StaleEpochError, TrainerStateLostError) as error:
                raise application_error(error, kind=_kind_of(error)) from error


def _kind_of(error: BaseException) -> str:
    """The failure type of an error that ended a lease."""
    from everburn.trainers.protocol import TrainerFailedError

    return TRAINER_FAILED if isinstance(error, TrainerFailedError) else TRAINER_STATE_LOST


def lease_queue(ref: LeaseRef) -> str:
    """A new task queue, on which only the holder of a lease listens: another process that has
    opened a session under the same epoch, and was given up over it, must get none of its work."""
    return f"everburn-trainer-{ref.run.id}-{ref.epoch}-{uuid.uuid4().hex[:8]}"
