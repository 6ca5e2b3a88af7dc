"""Workers against an emulator: both of its services under the same workflows.

The workers are as in production, except that a lease polls its job and deployment more often: those
of the emulator are ready at once.
"""

import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError

from activities.rollouts import RolloutActivities
from activities.trainer import TrainerActivities
from everburn.emulator.models.base_model import TINY
from everburn.emulator.training.checkpoints import weights_digest
from everburn.records.checkpoints import find_checkpoint
from everburn.records.ids import RunRef
from everburn.records.provisioning import ProvisioningRecord, find_provisioning
from everburn.records.run_folder import stored_config
from everburn.records.verification import Verified, verify
from everburn.trainers.backends import EMULATOR_URL_ENV, on_shared_emulator
from everburn.trainers.serverless import ServerlessTrainer
from support.emulator import RunningEmulator, running_emulator
from support.farm import register_namespace, shared_workflow_modules
from support.histories import check_payloads, replay, run_histories
from support.runs import StartedRun
from support.waiting import until
from workers.plugin import everburn_plugin
from workers.processes import orchestrator, rollout_worker, trainer_worker
from workflows.children import provisioning
from workflows.messages import RunResult, Status
from workflows.queues import ORCHESTRATOR_QUEUE
from workflows.run.train_run import TrainRun

NAMESPACE = "backends"
_numbers = itertools.count(1)


@dataclass
class Run(StartedRun):
    """A run and what its test reads of it."""

    service: "Service"

    patience = 90.0

    @property
    def rewards(self) -> list[float]:
        """The raw reward of each step."""
        return [float(entry.metrics["rollout/raw_reward"]) for entry in self.ledger]

    @property
    def provisioned(self) -> ProvisioningRecord:
        found = find_provisioning(self.store)
        assert found is not None
        return found

    async def until_waiting_for(self, text: str) -> Status:
        """The status, once it says that the run waits for this."""
        seen: list[Status] = []

        async def says() -> bool:
            seen[:] = [await self.status()]
            return text in seen[0].waiting_for

        await until(says, lambda: f"to wait for {text!r}, and the status is {seen}", self.patience)
        return seen[0]

    def state_at(self, step: int) -> tuple[str, str]:
        """Digests of the weights and the optimizer that were saved after a step."""
        saved = find_checkpoint(self.store, step)
        assert saved is not None
        weights, optimizer = weights_digest(self.service.emulator.home, saved.path).split("/")
        return weights, optimizer

    async def verified(self) -> Verified:
        """The run's weights are those of its ledger, bit for bit."""
        config = on_shared_emulator(stored_config(self.ref))
        home = self.service.emulator.home
        return await verify(
            self.ref,
            lambda: ServerlessTrainer.open(config),
            lambda path: weights_digest(home, path),
            name=f"verify-{time.time_ns()}",
        )


@dataclass
class Service:
    """The emulator, with workers that train on it."""

    emulator: RunningEmulator
    client: Client
    runs: list[Run] = field(default_factory=list)

    async def start(self, store: Path, **fields: Any) -> Run:
        """Start a run with these fields of its configuration and this number of rows."""
        run = RunRef(store=str(store), id=f"run-{next(_numbers)}")
        return await self.continue_run(run, a_config(store, **fields), None)

    async def continue_run(self, run: RunRef, config: dict[str, Any], state: Any) -> Run:
        """Start a run's workflow, from its state if it is resumed."""
        arguments = [config] if state is None else [config, state]
        handle: WorkflowHandle[Any, RunResult] = await self.client.start_workflow(
            TrainRun.run, args=arguments, id=run.id, task_queue=ORCHESTRATOR_QUEUE
        )
        started = Run(run, handle, self)
        self.runs.append(started)
        return started

    def admin(self, path: str, **body: Any) -> None:
        self.emulator.admin("POST", path, body)

    @property
    def state(self) -> dict[str, Any]:
        return self.emulator.admin("GET", "state")


def a_config(store: Path, rows: int = 8, **fields: Any) -> dict[str, Any]:
    """A run whose rewards rise with any training."""
    return {
        "rollout": "support.small_numbers:make_rollout_fn",
        "dataset": {"name": "support.small_numbers:rows", "kwargs": {"count": rows}},
        "base_model": TINY,
        "lora_rank": 4,
        "completions_per_prompt": 4,
        "prompt_groups_per_step": 2,
        "max_completion_tokens": 3,
        "learning_rate": 0.01,
        "dcp_save_interval": 2,
        "store": str(store),
    } | fields


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_service(
    temporal_server: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Service]:
    await register_namespace(temporal_server, NAMESPACE)
    plugins = [everburn_plugin(), shared_workflow_modules()]
    client = await Client.connect(temporal_server, namespace=NAMESPACE, plugins=plugins)
    rollouts, trainers = RolloutActivities(client), TrainerActivities(client)
    async with contextlib.AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(provisioning, "FIRST_INTERVAL", 0.1)
        running = stack.enter_context(running_emulator(tmp_path_factory.mktemp("backends")))
        patch.setenv(EMULATOR_URL_ENV, running.url)
        stack.callback(rollouts.close)
        stack.push_async_callback(trainers.close)
        for worker in (
            orchestrator(client),
            rollout_worker(client, rollouts, 100),
            trainer_worker(client, trainers),
        ):
            await stack.enter_async_context(worker)
        yield Service(running, client)


@pytest_asyncio.fixture(loop_scope="session")
async def service(shared_service: Service) -> AsyncIterator[Service]:
    """No planned faults, full capacity, default answers. Histories are checked after the test."""
    yield shared_service
    shared_service.emulator.admin("DELETE", "faults")
    shared_service.admin("unknowns")
    shared_service.admin("capacity")
    shared_service.admin("hotload")
    while shared_service.runs:
        run = shared_service.runs.pop()
        with contextlib.suppress(RPCError):
            await run.handle.terminate("its test is over")
        first = run.handle.first_execution_run_id
        assert first is not None
        histories = await run_histories(shared_service.client, run.ref.id, first)
        for history in histories:
            check_payloads(history)
        await replay(histories, [everburn_plugin()])
