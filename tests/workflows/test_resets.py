"""`temporal workflow reset` takes a run back to a moment to which no trainer can go back."""

import asyncio
from dataclasses import dataclass

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError

from activities import trainer
from support.farm import Farm, Run, Start
from support.script import Draw, Script
from support.waiting import Gate, until
from workers.stack.temporal_server import find_binary
from workflows.run import train_run, watchdog


@pytest.fixture(autouse=True)
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "PROBE_INTERVAL", 0.2)


@dataclass
class Reset:
    """A run that a test resets."""

    farm: Farm
    run: Run

    async def __call__(self, *options: str, workflow: str | None = None) -> None:
        """`temporal workflow reset`, with the real binary."""
        arguments = ["--address", self.farm.client.service_client.config.target_host]
        arguments += ["--namespace", self.farm.client.namespace]
        arguments += ["--workflow-id", workflow or self.run.id, "--reason", "a test"]
        reset = await asyncio.create_subprocess_exec(
            find_binary(),
            *("workflow", "reset", *arguments, *options),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await reset.communicate()
        assert reset.returncode == 0, output.decode()

    async def failure(self, workflow: str | None = None) -> ApplicationError:
        """The failure of the reset execution."""
        handle = self.farm.client.get_workflow_handle(workflow or self.run.id)
        with pytest.raises(WorkflowFailureError) as failure:
            await asyncio.wait_for(handle.result(), 30)
        assert isinstance(failure.value.cause, ApplicationError), failure.value.cause
        return failure.value.cause

    async def event(self, kind: str, number: int = 0) -> int:
        """The first completed workflow task after such an event."""
        history = await self.run.handle.fetch_history()
        found = [e.event_id for e in history.events if e.WhichOneof("attributes") == kind]
        return next(
            event.event_id
            for event in history.events
            if event.event_id > found[number]
            and event.HasField("workflow_task_completed_event_attributes")
        )


async def nothing_is_open(farm: Farm, run: Run) -> bool:
    """The run is closed, and so are its children."""
    query = "ExecutionStatus = 'Running'"
    return not [
        found.id
        async for found in farm.client.list_workflows(query)
        if found.id == run.id or found.id.startswith(f"{run.id}/")
    ]


@pytest.mark.parametrize("to", ["FirstWorkflowTask", "LastWorkflowTask", "child", "commit"])
async def test_a_reset_run_fails_at_once_and_says_why(start: Start, farm: Farm, to: str):
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.row >= 3:
            await gate.passed()
        return draw.completion

    run = await start(Script(play), rows=8, max_head_offpolicy_versions=2)
    await run.until(step=3, waiting_for="1 more prompt groups")
    await until(lambda: len(run.script.begun) == 12)
    reset = Reset(farm, run)
    match to:
        case "child":
            event = await reset.event("child_workflow_execution_started_event_attributes", 1)
            options = ["--event-id", str(event)]
        case "commit":
            event = await reset.event("workflow_execution_signaled_event_attributes", 3)
            options = ["--event-id", str(event)]
        case _:
            options = ["--type", to]
    calls, begun, ledger = list(run.trainer.calls), list(run.script.begun), run.ledger
    await reset(*options)
    failure = await reset.failure()
    assert failure.type in ("WasReset", "RunFolderTakenError"), failure
    assert "everburn resume" in failure.message
    await run.trainer.reached("close")
    assert run.trainer.calls == [*calls, "close"]
    assert (run.script.begun, run.ledger) == (begun, ledger)
    gate.open()


async def test_an_ended_run_cannot_be_reset(start: Start, farm: Farm):
    run = await start(Script(), rows=3)
    await run.result()
    calls, begun, ledger = list(run.trainer.calls), list(run.script.begun), run.ledger
    reset = Reset(farm, run)
    event = await reset.event("workflow_execution_signaled_event_attributes", 2)
    await reset("--event-id", str(event))
    failure = await reset.failure()
    assert failure.type == "WasReset"
    assert (run.trainer.calls, run.script.begun, run.ledger) == (calls, begun, ledger)
    await until(lambda: nothing_is_open(farm, run))


async def test_a_failed_run_cannot_be_reset_to_its_cleanup(start: Start, farm: Farm):
    async def play(draw: Draw) -> float:
        raise RuntimeError("no such tool")

    run = await start(Script(play), rows=1)
    await run.failure()
    calls = list(run.trainer.calls)
    reset = Reset(farm, run)
    await reset("--type", "LastWorkflowTask")
    assert (await reset.failure()).type == "WasReset"
    assert run.trainer.calls == calls
    await until(lambda: nothing_is_open(farm, run))


async def test_a_run_that_continued_as_new_cannot_be_reset(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(train_run, "MAX_HISTORY", 1)
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.row >= 2:
            await gate.passed()
        return draw.completion

    run = await start_tuned(Script(play), rows=4)
    await run.until(step=2, waiting_for="1 more prompt groups")
    reset = Reset(tunable_farm, run)
    await reset("--type", "LastWorkflowTask")
    assert (await reset.failure()).type == "WasReset"
    await run.trainer.reached("close")
    assert len(run.ledger) == 2
    gate.open()


@pytest.mark.parametrize("to", ["FirstWorkflowTask", "LastWorkflowTask"])
async def test_a_reset_lease_is_lost(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch, to: str
):
    """A reset lease is noticed when it opens another session; one that can't, by the watchdog."""
    monkeypatch.setattr(watchdog, "INTERVAL", 0.2)
    gate = Gate()

    async def play(draw: Draw) -> float:
        await gate.passed()
        return draw.completion

    run = await start_tuned(Script(play), rows=1)
    await until(lambda: len(run.script.begun) == 2)
    await Reset(tunable_farm, run)("--type", to, workflow=f"{run.id}/lease-1")
    await run.until(lease_epoch=2)
    gate.open()
    await run.result()
    assert [entry.lease_epoch for entry in run.ledger] == [2]
    await until(lambda: run.trainer.count("open") == run.trainer.count("close"))
    assert run.trainer.count("optim_step") == 1
