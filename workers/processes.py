"""The worker processes: what each serves, and how it stops.

On SIGTERM or SIGINT a worker stops polling and gives running activities a grace period; other
workers continue the run. Doesn't own the command line (workers/cli/app.py) or the local stack
(workers/stack/attachment.py).
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker, WorkerDeploymentConfig

from activities.contracts import (
    ProvisioningContract,
    ReconciliationContract,
    RecordContract,
    RolloutContract,
    TrainerContract,
    activities_of,
)
from activities.heartbeats import THROTTLE
from activities.provisioning import ProvisioningActivities
from activities.reconciliation import ReconciliationActivities
from activities.records import RecordActivities
from everburn.trainers import sdk
from everburn.usercode.loop import CLOSE_TIMEOUT
from workers.exits import leave_blocked
from workflows.children.evaluation import Evaluation
from workflows.children.prompt_group import PromptGroup
from workflows.children.trainer_lease import TrainerLease, UpgradedTrainerLease
from workflows.queues import ORCHESTRATOR_QUEUE, ROLLOUT_QUEUE, TRAINER_QUEUE
from workflows.run.train_run import TrainRun

if TYPE_CHECKING:
    from activities.rollouts import RolloutActivities
    from activities.trainer import TrainerActivities

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
    return _worker(
        client,
        ORCHESTRATOR_QUEUE,
        build,
        workflows=WORKFLOWS if build is None else VERSIONED_WORKFLOWS,
        activities=[
            *activities_of(RecordContract, RecordActivities(client)),
            *activities_of(ReconciliationContract, ReconciliationActivities(client)),
        ],
        sticky_queue_schedule_to_start_timeout=STICKY_TIMEOUT,
    )


def rollout_worker(
    client: Client, activities: "RolloutActivities", slots: int, build: str | None = None
) -> Worker:
    """Serves activities that run user code."""
    return _worker(
        client,
        ROLLOUT_QUEUE,
        build,
        activities=activities_of(RolloutContract, activities),
        max_concurrent_activities=slots,
    )


def trainer_worker(
    client: Client, activities: "TrainerActivities", build: str | None = None
) -> Worker:
    """Acquires leases, each of which is then served on its own queue, and provisions trainer jobs
    and deployments."""
    return _worker(
        client,
        TRAINER_QUEUE,
        build,
        activities=[
            *activities_of(TrainerContract, activities),
            *activities_of(ProvisioningContract, ProvisioningActivities(client)),
        ],
        # One poller: a frozen worker keeps the tasks of its pollers until they time out.
        activity_task_poller_behavior=PollerBehaviorSimpleMaximum(maximum=1),
    )


@asynccontextmanager
async def serving(
    role: Role, client: Client, slots: int = ROLLOUT_SLOTS, build: str | None = None
) -> AsyncIterator[Worker]:
    """A worker of a role, closed afterwards. The modules that only its role needs are imported
    here, before it polls."""
    match role:
        case "orchestrator":
            yield orchestrator(client, build)
        case "rollout":
            from activities.rollouts import RolloutActivities

            rollouts = RolloutActivities(client)
            try:
                worker = rollout_worker(client, rollouts, slots, build)
                async with _leaving_when_blocked(rollouts, worker):
                    yield worker
            finally:
                await _close(rollouts)
        case "trainer":
            from activities.trainer import TrainerActivities

            sdk.load()
            trainer = TrainerActivities(client)
            try:
                yield trainer_worker(client, trainer, build)
            finally:
                await trainer.close()


async def _close(rollouts: "RolloutActivities") -> None:
    """Let cancelled rollouts clean up before the process ends."""
    rollouts.close()
    if not await asyncio.to_thread(rollouts.join, CLOSING):
        log.warning("user code doesn't end; the process ends without it")


@asynccontextmanager
async def _leaving_when_blocked(
    rollouts: "RolloutActivities", worker: Worker
) -> AsyncIterator[None]:
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
