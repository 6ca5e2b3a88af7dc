"""The worker processes: what each serves, and how it goes down.

On SIGTERM or SIGINT a worker stops polling, gives running activities a grace period, and leaves the
run to the next worker. Doesn't own the command line (workers/cli/app.py) or the local stack
(workers/stack/attachment.py).
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Literal

from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker, WorkerDeploymentConfig

from activities.heartbeats import THROTTLE
from activities.provisioning import ProvisioningActivities
from activities.reconciliation import ReconciliationActivities
from activities.records import RecordActivities
from activities.rollouts import RolloutActivities
from activities.runners import preload as preload_rollouts
from activities.trainer import TrainerActivities
from activities.trainer import preload as preload_trainer
from everburn.usercode.loop import CLOSE_TIMEOUT
from workers.exits import leave_blocked
from workflows.children.evaluation import Evaluation
from workflows.children.prompt_group import PromptGroup
from workflows.children.trainer_lease import TrainerLease, UpgradedTrainerLease
from workflows.queues import ORCHESTRATOR_QUEUE, ROLLOUT_QUEUE, TRAINER_QUEUE
from workflows.run.train_run import TrainRun

Role = Literal["orchestrator", "rollout", "trainer"]

log = logging.getLogger(__name__)

DEPLOYMENT = "everburn"
"""The name under which a server knows the builds of these workers."""
WORKFLOWS = [TrainRun, PromptGroup, TrainerLease, Evaluation]
VERSIONED_WORKFLOWS = [TrainRun, PromptGroup, UpgradedTrainerLease, Evaluation]
GRACE = timedelta(seconds=10)
CLOSING = CLOSE_TIMEOUT + 1.0
"""Seconds for user code to end that the grace period was too short for."""
TELLING = 5.0
"""Seconds for a blocked worker to say what has become of its activities."""
STICKY_TIMEOUT = timedelta(seconds=2)
"""How long a task waits for a dead orchestrator's cache: part of every recovery."""
ROLLOUT_SLOTS = 512


def deployment(build: str | None) -> WorkerDeploymentConfig | None:
    """How workers of a build are told from those of another; None leaves a worker unversioned.

    A workflow stays with the build that it began on; a run changes over between two steps.
    """
    if build is None:
        return None
    return WorkerDeploymentConfig(
        version=WorkerDeploymentVersion(deployment_name=DEPLOYMENT, build_id=build),
        use_worker_versioning=True,
        default_versioning_behavior=VersioningBehavior.PINNED,
    )


def orchestrator(client: Client, build: str | None = None) -> Worker:
    """Workflows, and the light activities on the run's records."""
    records = RecordActivities(client)
    reconciliation = ReconciliationActivities(client)
    return Worker(
        client,
        task_queue=ORCHESTRATOR_QUEUE,
        workflows=WORKFLOWS if build is None else VERSIONED_WORKFLOWS,
        activities=[
            records.create_run,
            records.commit_step,
            records.record_producer,
            records.record_evaluation,
            records.carry_publication,
            records.record_control,
            records.skip_group,
            records.finish_run,
            records.count_sandboxes,
            reconciliation.reconcile,
            reconciliation.run_is_open,
        ],
        sticky_queue_schedule_to_start_timeout=STICKY_TIMEOUT,
        max_heartbeat_throttle_interval=THROTTLE,
        graceful_shutdown_timeout=GRACE,
        deployment_config=deployment(build),
    )


def rollout_worker(
    client: Client, activities: RolloutActivities, slots: int, build: str | None = None
) -> Worker:
    """Everything that runs user code."""
    return Worker(
        client,
        task_queue=ROLLOUT_QUEUE,
        activities=[
            activities.prepare_task,
            activities.rollout,
            activities.complete_group,
            activities.reap,
            activities.evaluate_shard,
            activities.evaluate_function,
            activities.complete_evaluation,
        ],
        max_concurrent_activities=slots,
        max_heartbeat_throttle_interval=THROTTLE,
        graceful_shutdown_timeout=GRACE,
        deployment_config=deployment(build),
    )


def trainer_worker(
    client: Client, activities: TrainerActivities, build: str | None = None
) -> Worker:
    """Leases are acquired here; each is then served on a queue of its own. Trainer jobs and
    deployments are looked after by any of these workers."""
    provisioning = ProvisioningActivities(client)
    return Worker(
        client,
        task_queue=TRAINER_QUEUE,
        activities=[
            activities.acquire_lease,
            provisioning.advance_provisioning,
            provisioning.clean_up_provisioning,
        ],
        # A worker that stands still keeps what its pollers have been given until that times out.
        activity_task_poller_behavior=PollerBehaviorSimpleMaximum(maximum=1),
        max_heartbeat_throttle_interval=THROTTLE,
        graceful_shutdown_timeout=GRACE,
        deployment_config=deployment(build),
    )


@asynccontextmanager
async def serving(
    role: Role, client: Client, slots: int = ROLLOUT_SLOTS, build: str | None = None
) -> AsyncIterator[Worker]:
    """A worker of a role, and what it must close afterwards."""
    match role:
        case "orchestrator":
            yield orchestrator(client, build)
        case "rollout":
            rollouts = RolloutActivities()
            try:
                async with _preloading(preload_rollouts):
                    worker = rollout_worker(client, rollouts, slots, build)
                    async with _leaving_when_blocked(rollouts, worker):
                        yield worker
            finally:
                await _close(rollouts)
        case "trainer":
            trainer = TrainerActivities(client)
            try:
                async with _preloading(preload_trainer):
                    yield trainer_worker(client, trainer, build)
            finally:
                await trainer.close()


async def _close(rollouts: RolloutActivities) -> None:
    """Let rollouts that were cancelled clean up after themselves: the process ends with this."""
    rollouts.close()
    if not await asyncio.to_thread(rollouts.join, CLOSING):
        log.warning("user code doesn't end, and is left behind")


@asynccontextmanager
async def _leaving_when_blocked(rollouts: RolloutActivities, worker: Worker) -> AsyncIterator[None]:
    """End the process where user code blocks its loop for good: its rollouts are begun again by
    others, and it is started again. It would keep them all, and finish none."""

    async def watch() -> None:
        stack = await rollouts.blocked()
        # Its activities have been given up; what they say of it is still to be told.
        await asyncio.wait([asyncio.create_task(worker.shutdown())], timeout=TELLING)
        leave_blocked(stack)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


@asynccontextmanager
async def _preloading(preload: Callable[[], None]) -> AsyncIterator[None]:
    """Import beside what the block does: it takes seconds, which the first task, and with it a
    recovery, would wait for otherwise."""
    task = asyncio.create_task(asyncio.to_thread(preload))
    try:
        yield
    finally:
        await task


async def run_worker(
    role: Role, client: Client, slots: int = ROLLOUT_SLOTS, build: str | None = None
) -> None:
    """Serve until SIGTERM or SIGINT."""
    async with serving(role, client, slots, build) as worker, worker:
        await until_stopped()


async def until_stopped() -> None:
    """Return at the first SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
