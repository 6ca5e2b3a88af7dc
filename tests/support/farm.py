"""A farm: all of Everburn's workers for one namespace, in this process.

Temporal server, workers and workflows are real. A farm's runs share its workers and differ by their
ids; each run's Script determines what its rollouts and its trainer do.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest
from google.protobuf.duration_pb2 import Duration
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import (
    Client,
    WorkflowHandle,
)
from temporalio.plugin import SimplePlugin
from temporalio.service import RPCError
from temporalio.worker import Worker, WorkerConfig, WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from activities.messages import LeaseRef
from activities.rollouts import RolloutActivities
from activities.trainer import TrainerActivities, open_session
from everburn.config import RunConfig
from everburn.records import metrics
from everburn.records.ids import RunRef
from everburn.records.run_folder import configured
from everburn.trainers.protocol import Trainer
from support.runs import StartedRun
from support.script import Script, scripts
from support.trainer import ScriptedTrainer
from workers import processes
from workers.plugin import everburn_plugin
from workers.processes import orchestrator, rollout_worker, trainer_worker
from workflows.messages import RunResult
from workflows.queues import ORCHESTRATOR_QUEUE
from workflows.restore import rebuilt_state
from workflows.run.state import RunState
from workflows.run.train_run import TrainRun

SLOTS = 1100
SCRIPTED = "scripted"
"""The base model of runs whose trainer is scripted."""
_numbers = itertools.count(1)


@dataclass
class Run(StartedRun):
    """A run of the farm, for its test."""

    script: Script

    @property
    def id(self) -> str:
        return self.ref.id

    @property
    def trainer(self) -> ScriptedTrainer:
        return self.script.trainer

    @property
    def first_execution(self) -> str:
        """The Temporal run id of its first execution."""
        assert self.handle.first_execution_run_id is not None
        return self.handle.first_execution_run_id

    @property
    def trained(self) -> list[str]:
        """The trained groups of all committed steps."""
        return [group.text for entry in self.ledger for group in entry.groups]

    def metrics(self, stream: str = metrics.STEP_STREAM) -> list[dict[str, Any]]:
        """The records of a stream, in order, with their amendments."""
        found = [record for record in metrics.read(self.store) if record.stream == stream]
        return [{stream: record.index} | record.values for record in found]


@dataclass
class Farm:
    client: Client
    plugins: list[SimplePlugin]
    tokenizer: Path
    runs: list[Run] = field(default_factory=list)
    """Runs whose histories haven't been checked."""

    async def start(self, script: Script, store: Path, **fields: Any) -> Run:
        """Start a run of `rows` rows; `fields` override its configuration."""
        ref = RunRef(store=str(store), id=f"run-{next(_numbers)}")
        scripts[ref.id] = script
        return await self._start(ref, script, self.config(ref.id, store, **fields))

    async def go_on(self, ref: RunRef, script: Script, config: RunConfig, state: RunState) -> Run:
        """Start a run with a state that was rebuilt from a folder."""
        return await self._start(ref, script, config.model_dump(mode="json"), state)

    async def resume(self, run: Run) -> Run:
        """Start the next incarnation of a run that has ended."""
        config = configured(run.ref)
        state = rebuilt_state(run.ref, config, time.time())
        return await self.go_on(run.ref, run.script, config, state)

    async def _start(self, ref: RunRef, script: Script, *args: Any) -> Run:
        handle: WorkflowHandle[Any, RunResult] = await self.client.start_workflow(
            TrainRun.run, args=args, id=ref.id, task_queue=ORCHESTRATOR_QUEUE
        )
        run = Run(ref, handle, script)
        self.runs.append(run)
        return run

    def config(self, run_id: str, store: Path, rows: int = 4, **fields: Any) -> dict[str, Any]:
        """A run's configuration with defaults for tests."""
        return (
            {
                "rollout": "support.tasks:make_rollout_fn",
                "dataset": {"name": "support.tasks:rows", "kwargs": {"count": rows}},
                "extras": {"script": run_id},
                "shuffle": False,
                "base_model": SCRIPTED,
                "tokenizer_model": str(self.tokenizer),
                "backend": "emulator",
                "completions_per_prompt": 2,
                "store": str(store),
            }
            | _entrypoints(run_id, scripts[run_id])
            | fields
        )

    @asynccontextmanager
    async def other_rollout_worker(self) -> AsyncIterator[RolloutActivities]:
        """A second rollout worker, which shuts down at the end of the block."""
        config = self.client.service_client.config
        client = await Client.connect(
            config.target_host, namespace=self.client.namespace, plugins=self.plugins
        )
        activities = RolloutActivities(client)
        async with rollout_worker(client, activities, SLOTS):
            yield activities
        activities.close()

    async def close(self, run: Run) -> None:
        """Terminate the run if a failed test left it running."""
        with contextlib.suppress(RPCError):
            await run.handle.terminate("its test is over")


class Start(Protocol):
    """Starts a run of `rows` rows; `fields` override its configuration."""

    def __call__(self, script: Script, **fields: Any) -> Awaitable[Run]: ...


def _entrypoints(run_id: str, script: Script) -> dict[str, Any]:
    named = {
        "evaluation": ("evaluate", script.evaluate),
        "dynamic_filter": ("keep", script.keep),
        "prepare_batch": ("prepare", script.prepare),
    }
    return {
        field: {"name": f"support.tasks:{name}", "kwargs": {"script": run_id}}
        for field, (name, function) in named.items()
        if function is not None
    }


@asynccontextmanager
async def open_farm(
    address: str,
    namespace: str,
    tokenizer: Path,
    *tuning: SimplePlugin,
    build: str | None = None,
) -> AsyncIterator[Farm]:
    """All workers of a namespace, which run during the block. tuning: plugins in addition to
    Everburn's own. build: the build id of versioned workers."""
    plugins = [everburn_plugin(), *tuning]
    client = await Client.connect(address, namespace=namespace, plugins=plugins)
    rollouts = RolloutActivities(client)
    trainers = TrainerActivities(client, _open_trainer)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(rollouts.close)
        stack.push_async_callback(trainers.close)
        for worker in _workers(client, rollouts, trainers, build):
            await stack.enter_async_context(worker)
        yield Farm(client, plugins, tokenizer)


class NoCache(SimplePlugin):
    """Disables the workflow cache: every task replays its whole history."""

    def __init__(self) -> None:
        super().__init__("no cache")

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        return {**super().configure_worker(config), "max_cached_workflows": 0}


def shared_workflow_modules() -> SimplePlugin:
    """Shares workflow modules with the sandbox, so that workflows see constants patched by a test.
    Otherwise the sandbox imports its own copies."""

    def share(runner: WorkflowRunner | None) -> WorkflowRunner:
        assert isinstance(runner, SandboxedWorkflowRunner)
        restrictions = runner.restrictions.with_passthrough_modules("workflows")
        return dataclasses.replace(runner, restrictions=restrictions)

    return SimplePlugin("shared workflow modules", workflow_runner=share)


async def register_namespace(address: str, name: str) -> None:
    """Register a namespace, which has its own task queues and no search attributes."""
    client = await Client.connect(address)
    await client.workflow_service.register_namespace(
        RegisterNamespaceRequest(
            namespace=name, workflow_execution_retention_period=Duration(seconds=24 * 3600)
        )
    )


def _workers(
    client: Client, rollouts: RolloutActivities, trainers: TrainerActivities, build: str | None
) -> list[Worker]:
    with pytest.MonkeyPatch.context() as patch:
        # Don't wait at shutdown for rollouts that tests left running.
        patch.setattr(processes, "GRACE", timedelta(0))
        return [
            orchestrator(client, build),
            rollout_worker(client, rollouts, SLOTS, build),
            trainer_worker(client, trainers, build),
        ]


async def _open_trainer(ref: LeaseRef, config: RunConfig) -> Trainer:
    """The run's scripted trainer; for a run with a real model, a session at its backend."""
    if config.base_model == SCRIPTED:
        return await scripts[str(config.extras["script"])].trainer.open()
    return await open_session(ref, config)
