"""Activities of the orchestrator: the run's folder, ledger and metrics, and the server's features.

All are light: they read and write JSON, in threads, so that a slow store never blocks the worker's
loop. While the store is full, they wait.
"""

import asyncio
import contextlib

from temporalio import activity
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.service import RPCError

from activities.contracts import RecordContract
from activities.messages import (
    CarryPublication,
    Committed,
    CreateRun,
    FinishRun,
    RecordCommand,
    RecordEvaluation,
    RecordProducer,
    RunCreated,
    SkipGroup,
)
from activities.search_attributes import SEARCH_ATTRIBUTES
from everburn.config import parse_config
from everburn.learning.group import skip_group
from everburn.records import metrics
from everburn.records.commands import record_command
from everburn.records.ids import RunRef
from everburn.records.ledger import LedgerEntry, StepCommit
from everburn.records.publications import carry_publication
from everburn.records.run_folder import (
    ServerAddress,
    create_run_folder,
    record_server,
    stored_config,
)
from everburn.records.steps import commit_step, record_step
from everburn.records.store import ArtifactStore, when_there_is_space
from everburn.rollouts.evaluation import keep_before_and_after
from everburn.rollouts.sandboxes import sandbox_keys


class RecordActivities(RecordContract):
    def __init__(self, client: Client) -> None:
        self._client = client

    @activity.defn
    async def create_run(self, order: CreateRun) -> RunCreated:
        await when_there_is_space(
            create_run_folder,
            order.run,
            parse_config(order.config),
            order.owner,
            order.at,
            order.step,
        )
        server = ServerAddress(
            address=self._client.service_client.config.target_host,
            namespace=self._client.namespace,
        )
        await when_there_is_space(record_server, ArtifactStore.of(order.run), server)
        return RunCreated(search_attributes=await self._has_search_attributes())

    @activity.defn
    async def commit_step(self, step: StepCommit) -> Committed:
        entry = await when_there_is_space(_commit, step)
        reward = entry.metrics.get("rollout/raw_reward")
        return Committed(reward=None if reward is None else float(reward))

    @activity.defn
    async def skip_group(self, order: SkipGroup) -> None:
        config = await asyncio.to_thread(stored_config, order.run)
        await when_there_is_space(
            skip_group,
            ArtifactStore.of(order.run),
            order.group,
            order.version,
            config.completions_per_prompt,
        )

    @activity.defn
    async def record_command(self, order: RecordCommand) -> None:
        await when_there_is_space(record_command, ArtifactStore.of(order.run), order.command)

    @activity.defn
    async def record_producer(self, order: RecordProducer) -> None:
        await when_there_is_space(metrics.record, ArtifactStore.of(order.run), order.records)

    @activity.defn
    async def record_evaluation(self, order: RecordEvaluation) -> None:
        await when_there_is_space(
            metrics.amend,
            ArtifactStore.of(order.run),
            metrics.STEP_STREAM,
            order.version,
            order.metrics,
        )

    @activity.defn
    async def carry_publication(self, order: CarryPublication) -> None:
        await when_there_is_space(carry_publication, ArtifactStore.of(order.run), order.version)

    @activity.defn
    async def finish_run(self, order: FinishRun) -> None:
        await when_there_is_space(
            keep_before_and_after, order.run, order.initial_version, order.final_version
        )
        await asyncio.to_thread(_time_saves, ArtifactStore.of(order.run), order.save_seconds)

    @activity.defn
    async def count_sandboxes(self, run: RunRef) -> int:
        return len(await asyncio.to_thread(sandbox_keys, ArtifactStore.of(run)))

    async def _has_search_attributes(self) -> bool:
        request = ListSearchAttributesRequest(namespace=self._client.namespace)
        with contextlib.suppress(RPCError):
            found = await self._client.operator_service.list_search_attributes(request)
            return all(key.name in found.custom_attributes for key in SEARCH_ATTRIBUTES)
        return False


def _commit(step: StepCommit) -> LedgerEntry:
    store = ArtifactStore.of(step.run)
    entry = commit_step(step)
    record_step(store, entry)
    _time_saves(store, step.save_seconds)
    metrics.record(store, step.producer)
    return entry


def _time_saves(store: ArtifactStore, seconds: dict[int, float]) -> None:
    """Record the save times of checkpoints that were saved after their step was recorded."""
    for step, value in seconds.items():
        metrics.amend(store, metrics.STEP_STREAM, step, {"checkpoint/wall_time": value})
