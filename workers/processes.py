"""The worker processes: what each serves, and how it stops.

On SIGTERM or SIGINT a worker stops polling and gives running activities a grace period; other
workers continue the run. Doesn't own the command line (workers/cli/app.py) or the local stack
(workers/stack/attachment.py).
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Literal

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
"""Deployment name of all versioned workers."""
WORKFLOWS = [TrainRun, PromptGroup, TrainerLease, Evaluation]
VERSIONED_WORKFLOWS = [TrainRun, PromptGroup, UpgradedTrainerLease, Evaluation]
GRACE = timedelta(seconds=10)
CLOSING = CLOSE_TIMEOUT + 1.0
"""Seconds for user code to end after the grace period."""
REPORT_TIMEOUT = 5.0
"""Seconds for a blocked worker to report the results of its activities."""
STICKY_TIMEOUT = timedelta(seconds=2)
"""How long a workflow task waits for the cache of a dead orchestrator."""
ROLLOUT_SLOTS = 512


def deployment(build: str | None) -> WorkerDeploymentConfig | None:
    """Worker versioning by build; None leaves a worker unversioned.

    A workflow stays on the build that it started on; a run changes builds between two steps.
    """
    if build is None:
        return None
    return WorkerDeploymentConfig(
        version=WorkerDeploymentVersion(deployment_name=DEPLOYMENT, build_id=build),
        use_worker_versioning=True,
        default_versioning_behavior=VersioningBehavior.PINNED,
    )


def _worker(client: Client, queue: str, build: str | None, **settings: Any) -> Worker:
    return Worker(
        client,
        task_queue=queue,
        max_heartbeat_throttle_interval=THROTTLE,
        graceful_shutdown_timeout=GRACE,
        deployment_config=deployment(build),
        **settings,
    )


def orchestrator(client: Client, build: str | None = None) -> Worker:
    """Serves workflows, and light activities on the run's records."""
    records = RecordActivities(client)
    reconciliation = ReconciliationActivities(client)
    return _worker(
        client,
        ORCHESTRATOR_QUEUE,
        build,
        workflows=WORKFLOWS if build is None else VERSIONED_WORKFLOWS,
        activities=[
            records.create_run,
            records.commit_step,
            records.record_producer,
            records.record_evaluation,
            records.carry_publication,
            records.record_command,
            records.skip_group,
            records.finish_run,
            records.count_sandboxes,
            reconciliation.reconcile,
            reconciliation.run_is_open,
        ],
        sticky_queue_schedule_to_start_timeout=STICKY_TIMEOUT,
    )


def rollout_worker(
    client: Client, activities: RolloutActivities, slots: int, build: str | None = None
) -> Worker:
    """Serves activities that run user code."""
    return _worker(
        client,
        ROLLOUT_QUEUE,
        build,
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
    )


def trainer_worker(
    client: Client, activities: TrainerActivities, build: str | None = None
) -> Worker:
    """Acquires leases, each of which is then served on its own queue, and provisions trainer jobs
    and deployments."""
    provisioning = ProvisioningActivities(client)
    return _worker(
        client,
        TRAINER_QUEUE,
        build,
        activities=[
            activities.acquire_lease,
            provisioning.advance_provisioning,
            provisioning.clean_up_provisioning,
        ],
        # One poller: a frozen worker keeps the tasks of its pollers until they time out.
        activity_task_poller_behavior=PollerBehaviorSimpleMaximum(maximum=1),
    )


@asynccontextmanager
async def serving(
    role: Role, client: Client, slots: int = ROLLOUT_SLOTS, build: str | None = None
) -> AsyncIterator[Worker]:
    """A worker of a role, closed afterwards."""
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
    """Let cancelled rollouts clean up before the process ends."""
    rollouts.close()
    if not await asyncio.to_thread(rollouts.join, CLOSING):
        log.warning("user code doesn't end; the process ends without it")


@asynccontextmanager
async def _leaving_when_blocked(rollouts: RolloutActivities, worker: Worker) -> AsyncIterator[None]:
    """End the process if user code blocks its event loop permanently, since it couldn't finish any
    rollout: other workers retry its rollouts, and its supervisor restarts it."""

    async def watch() -> None:
        stack = await rollouts.blocked()
        # Its activities have been abandoned; their failures are still to be reported.
        await asyncio.wait([asyncio.create_task(worker.shutdown())], timeout=REPORT_TIMEOUT)
        leave_blocked(stack)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


@asynccontextmanager
async def _preloading(preload: Callable[[], None]) -> AsyncIterator[None]:
    """Import in a thread during the block; otherwise the first task, perhaps a recovery's, would
    wait for seconds."""
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
