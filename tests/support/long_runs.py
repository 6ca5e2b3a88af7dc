"""Runs on a real server that train nothing and end on a test's command."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from temporalio import workflow
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from support.farm import register_namespace
from workflows.messages import RunResult, StopRequest
from workflows.queues import ORCHESTRATOR_QUEUE


@workflow.defn(name="TrainRun")
class LongRun:
    """Continues as new on a signal; a real run does so after thousands of events."""

    def __init__(self) -> None:
        self._goes_on = False
        self._stopped = False

    @workflow.run
    async def run(self, values: dict[str, Any]) -> RunResult:
        await workflow.wait_condition(lambda: self._goes_on or self._stopped)
        if self._goes_on:
            workflow.continue_as_new(values)
        return RunResult(
            run=workflow.info().workflow_id,
            folder=values["store"],
            steps=3,
            version=3,
            rows=6,
            stopped=True,
            seconds=7.0,
            checkpoint=None,
            evaluations={},
        )

    @workflow.signal
    def go_on(self) -> None:
        self._goes_on = True

    @workflow.signal
    def stop(self, request: StopRequest) -> None:
        self._stopped = True


@asynccontextmanager
async def long_runs(address: str, namespace: str) -> AsyncIterator[None]:
    """A worker for long runs, in a new namespace."""
    await register_namespace(address, namespace)
    # Everburn's own clients accept only Everburn's workflows.
    client = await Client.connect(
        address, namespace=namespace, data_converter=pydantic_data_converter
    )
    async with Worker(
        client,
        task_queue=ORCHESTRATOR_QUEUE,
        workflows=[LongRun],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        yield
