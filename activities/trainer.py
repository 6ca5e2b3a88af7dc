"""Activities of trainer workers: acquiring a lease, holding it, and serving its operations.

A lease lives in the process that acquired it. That process starts a second worker, on the lease's
own task queue. Doesn't own what an operation does (trainer_operations.py).
"""

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from activities.contracts import (
    LEASE_SLOTS,
    HolderContract,
    LeaseContract,
    TrainerContract,
    activities_of,
)
from activities.heartbeats import THROTTLE
from activities.liveness import RunLiveness
from activities.messages import LeaseGrant, LeaseRef
from activities.trainer_operations import LeaseOperations
from everburn.config import RunConfig
from everburn.records.ids import RunRef
from everburn.records.run_folder import stored_config
from everburn.trainers.dedicated import DedicatedTrainer
from everburn.trainers.lease import Lease
from everburn.trainers.protocol import (
    Trainer,
    TrainerClosedError,
    TrainerError,
    TrainerStateLostError,
)
from everburn.trainers.serverless import ServerlessTrainer
from everburn.trainers.session_opening import Openings, wait_for_session
from everburn.usercode.entrypoints import resolve, worker_name
from everburn.usercode.limits import LimitedLoop

OpenTrainer = Callable[[LeaseRef, RunConfig], Awaitable[Trainer]]

log = logging.getLogger(__name__)

PROBE_INTERVAL = 5.0
"""Seconds between probes of the session and its run, also while nothing trains."""
PROBE_TIMEOUT = 30.0
"""Seconds. Generous, since a server under load answers late."""
CLAIM_TIMEOUT = 30.0
"""Seconds after which a granted lease is released unless `hold_lease` has started."""
LEASE_GRACE = timedelta(seconds=5)
"""Time for activities of a released lease to report their results."""
MAX_IDLE_LOOPS = 8
"""Batch loops kept for runs of which this process holds no lease at the moment."""


@dataclass
class HeldLease:
    """A lease that this process holds, and the worker that serves its queue."""

    lease: Lease
    operations: LeaseOperations
    worker: Worker
    serving: asyncio.Task[None]
    expiry: asyncio.Task[None] | None = None
    claimed: bool = False
    """Whether the run has received the grant."""
    stopping: asyncio.Task[None] | None = None


async def open_session(ref: LeaseRef, config: RunConfig) -> Trainer:
    """Open a session at the run's backend."""
    if config.dedicated:
        return await DedicatedTrainer.open_for(ref.run, config, ref.lease_key)
    return await ServerlessTrainer.open(config)


class TrainerActivities(TrainerContract, HolderContract):
    """The leases of this process."""

    def __init__(self, client: Client, open_trainer: OpenTrainer = open_session) -> None:
        self.held: dict[LeaseRef, HeldLease] = {}
        self._client = client
        self._liveness = RunLiveness(client)
        self._open_trainer = open_trainer
        self._openings = Openings[LeaseRef, HeldLease]()
        self._batch_loops: OrderedDict[RunRef, LimitedLoop] = OrderedDict()
        """Loops of `prepare_batch` by run, in order of last use. A blocked loop delays its own run
        only. Loops outlive leases: objects that user code opened are bound to its loop."""

    @activity.defn
    async def acquire_lease(self, ref: LeaseRef) -> LeaseGrant:
        # On a trainer job, a new session would end the one of a later attempt.
        if not await self._liveness.awaits(activity.info()):
            raise TrainerStateLostError(
                f"this attempt at lease {ref.lease_key.text} was given up before it began"
            )
        # A process that was suspended may run several attempts at a lease at once.
        held = await self._openings.join(ref, lambda: self._find_or_open(ref))
        return LeaseGrant(
            incarnation=ref.incarnation,
            lease_epoch=ref.lease_epoch,
            task_queue=held.worker.task_queue,
            session=held.lease.trainer.session,
            holder=worker_name(),
        )

    @activity.defn
    async def hold_lease(self, ref: LeaseRef) -> None:
        held = self.held.get(ref)
        if held is None:
            raise TrainerStateLostError(
                f"this process doesn't hold lease {ref.lease_key.text} of run {ref.run.id}"
            )
        held.claimed = True
        lease = held.lease
        try:
            while lease.ended is None:
                await self._probe(lease)
                if not await self._is_wanted(ref):
                    # A terminated run can't release its lease.
                    await lease.release()
                await lease.wait_ended(PROBE_INTERVAL)
        except asyncio.CancelledError:
            # The heartbeat timed out: this process was suspended for too long.
            await lease.end(
                TrainerStateLostError(f"lease {ref.lease_key.text} was given up by its run")
            )
            raise
        finally:
            self._retire(ref)
        if lease.closed is not None:
            # This may reach the run before the operation's own failure.
            raise lease.closed
        if not lease.released:
            raise lease.ended

    @activity.defn
    async def release_lease(self, ref: LeaseRef) -> None:
        held = self.held.get(ref)
        if held is not None:
            await held.lease.release()
            self._retire(ref)

    async def close(self) -> None:
        """End all leases and their sessions: the process is shutting down."""
        await self._openings.cancel()
        await asyncio.gather(*(self._end(ref) for ref in list(self.held)))
        for loop in self._batch_loops.values():
            loop.close()

    async def _end(self, ref: LeaseRef) -> None:
        held = self.held[ref]
        if held.stopping is None:
            await held.lease.release()
            self._retire(ref)
        if held.stopping is not None:
            await held.stopping

    async def _find_or_open(self, ref: LeaseRef) -> HeldLease:
        """Find the lease in this process, or open it. Must not run concurrently for one lease: the
        second session would replace the granted one."""
        held = self.held.get(ref)
        if held is not None:
            return held
        if not await self._is_wanted(ref):
            raise TrainerStateLostError(
                f"run {ref.run.id} has no use for lease {ref.lease_key.text} any more"
            )
        await self._end_superseded(ref)
        config = await asyncio.to_thread(stored_config, ref.run)
        for entrypoint in config.trainer_entrypoints:
            # Trainer and rollout workers may have different modules installed.
            await asyncio.to_thread(resolve, entrypoint)
        lease = Lease(ref.lease_key, await wait_for_session(self._open_trainer(ref, config)))
        held = self.held[ref] = self._serve(ref, lease)
        held.expiry = asyncio.create_task(self._expire_unclaimed(ref))
        return held

    def _batch_loop(self, run: RunRef) -> LimitedLoop:
        loop = self._batch_loops.pop(run, None) or LimitedLoop("batches")
        self._batch_loops[run] = loop
        held = {ref.run for ref in self.held}
        idle = [each for each in self._batch_loops if each not in held]
        for each in idle[: max(0, len(idle) - MAX_IDLE_LOOPS)]:
            self._batch_loops.pop(each).close()
        return loop

    async def _end_superseded(self, ref: LeaseRef) -> None:
        """End the leases of the same run that this process still holds."""
        superseded = TrainerStateLostError(f"lease {ref.lease_key.text} has taken over")
        for old in [
            held for held in self.held if held.run == ref.run and held.lease_key < ref.lease_key
        ]:
            await self.held[old].lease.end(superseded)
            # Not awaited: closing the old session may hang, and would delay the new one.
            self._retire(old)

    async def _expire_unclaimed(self, ref: LeaseRef) -> None:
        """Release a lease whose grant never reached the run: the activity had timed out."""
        await asyncio.sleep(CLAIM_TIMEOUT)
        held = self.held.get(ref)
        if held is not None and not held.claimed:
            log.warning("lease %s of run %s isn't claimed", ref.lease_key.text, ref.run.id)
            await held.lease.release()
            self._retire(ref)

    def _serve(self, ref: LeaseRef, lease: Lease) -> HeldLease:
        operations = LeaseOperations(lease, ref.run, partial(self._batch_loop, ref.run))
        worker = Worker(
            self._client,
            task_queue=lease_queue(ref),
            activities=[
                *activities_of(HolderContract, self),
                *activities_of(LeaseContract, operations),
            ],
            max_concurrent_activities=LEASE_SLOTS,
            max_heartbeat_throttle_interval=THROTTLE,
            graceful_shutdown_timeout=LEASE_GRACE,
        )
        return HeldLease(lease, operations, worker, asyncio.create_task(worker.run()))

    def _retire(self, ref: LeaseRef) -> None:
        """Stop serving an ended lease's queue, once its running activities have reported."""
        held = self.held.get(ref)
        if held is not None and held.stopping is None:
            # Not awaited: the callers are activities of the worker that is being stopped.
            held.stopping = asyncio.create_task(self._stop_serving(ref))

    async def _stop_serving(self, ref: LeaseRef) -> None:
        held = self.held[ref]
        if held.expiry is not None:
            held.expiry.cancel()
        try:
            await held.worker.shutdown()
            await held.serving
        except Exception as error:
            log.warning(
                "the queue of lease %s of run %s: %s", ref.lease_key.text, ref.run.id, error
            )
        finally:
            if not held.lease.released:
                # The run gave the lease up, but its session may still be open and billed.
                await held.lease.trainer.close()
            del self.held[ref]

    async def _is_wanted(self, ref: LeaseRef) -> bool:
        """Whether the run is still in the incarnation that asked for the lease."""
        return await self._liveness.seems_alive(ref.run, ref.incarnation)

    async def _probe(self, lease: Lease) -> None:
        """End the lease if its session no longer works."""
        try:
            await asyncio.wait_for(lease.trainer.probe(), PROBE_TIMEOUT)
        except TrainerClosedError as error:
            await lease.close_for(error)
        except TrainerError as error:
            # Even a TrainerFailedError only means a lost session: no operation has failed.
            await lease.end(TrainerStateLostError(str(error)))
        except TimeoutError:
            await lease.end(
                TrainerStateLostError(f"the session didn't answer within {PROBE_TIMEOUT:g} s")
            )


def lease_queue(ref: LeaseRef) -> str:
    """A unique task queue per session: another process that opened a session under the same lease,
    and whose attempt timed out, must get none of its tasks."""
    return f"everburn-trainer-{ref.run.id}-{ref.lease_key.text}-{uuid.uuid4().hex[:8]}"
