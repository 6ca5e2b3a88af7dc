"""A run outlives the workers that it started on: it changes over to a newer build."""

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from temporalio.client import Client

from everburn.records.ids import GroupKey
from support.farm import Farm, Run, open_farm, register_namespace
from support.histories import replay, run_histories
from support.script import Draw, Script
from support.waiting import Gate, until
from workers.stack.temporal_server import find_binary
from workflows.messages import Released
from workflows.run.train_run import TrainRun

NAMESPACE = "builds"


async def test_a_run_changes_over_to_a_new_build_between_two_steps(
    temporal_server: str, tiny_tokenizer: Path, tmp_path: Path
):
    await register_namespace(temporal_server, NAMESPACE)
    rows = 8
    gates = [Gate() for _ in range(rows)]
    gates[0].open()

    async def play(draw: Draw) -> float:
        await gates[draw.row].passed()
        return draw.completion

    def workers(build: str) -> AbstractAsyncContextManager[Farm]:
        return open_farm(temporal_server, NAMESPACE, tiny_tokenizer, build=build)

    async with contextlib.AsyncExitStack() as old, workers("2") as new:
        first = await old.enter_async_context(workers("1"))
        client = new.client
        await make_current(temporal_server, "1")
        run = await first.start(Script(play), tmp_path, rows=rows, max_head_offpolicy_versions=2)
        await run.until(step=1, groups_in_flight=3)
        assert await builds_of(client, run, "row-1.0", "lease-1") == ["1", "1", "1"]

        await make_current(temporal_server, "2")
        await until(lambda: is_notified(client, run), lambda: "the run isn't notified")
        gates[1].open()
        await until(lambda: runs_on(client, run, "2"), lambda: "the run stays with the old build")
        # Groups stay on their build, and report to the run on the new build.
        gates[2].open()
        await run.until(step=3, groups_in_flight=3)
        assert await builds_of(client, run, "row-3.0", "row-5.0") == ["2", "1", "2"]
        assert run.trainer.count("open") == 1

        gates[3].open()
        gates[4].open()
        await run.until(step=5, groups_in_flight=3)
        # The old build can stop, and with it the session that its trainer worker holds.
        await old.aclose()
        for gate in gates:
            gate.open()
        result = await run.result()
        assert (result.steps, result.rows) == (rows, rows)
        assert sorted(run.trained) == [str(row) for row in range(rows)]
        assert {entry.lease_epoch for entry in run.ledger} == {1, 2}
        await replay(await run_histories(client, run.id, run.first_execution), new.plugins)


async def make_current(address: str, build: str) -> None:
    """Make a build current like an operator, once its workers are up."""
    command = [
        *("worker", "deployment", "set-current-version", "--yes", "--address", address),
        *("--namespace", NAMESPACE, "--deployment-name", "everburn", "--build-id", build),
    ]

    async def is_set() -> bool:
        process = await asyncio.create_subprocess_exec(
            find_binary(),
            *command,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await process.wait() == 0

    await until(is_set, lambda: f"build {build} can't become current")


async def is_notified(client: Client, run: Run) -> bool:
    """Whether the server has noticed the new build for this run. Each workflow task says so: a
    signal without effect causes one."""
    late = Released(key=GroupKey(cursor=10**6), total=0)
    await run.handle.signal(TrainRun.released, late)
    history = await client.get_workflow_handle(run.id).fetch_history()
    notified = [
        event.workflow_task_started_event_attributes.target_worker_deployment_version_changed
        for event in history.events
        if event.HasField("workflow_task_started_event_attributes")
    ]
    return notified[-1]


async def builds_of(client: Client, run: Run, *children: str) -> list[str]:
    """The builds that execute a run and some of its children."""
    found = []
    for workflow in (run.id, *(f"{run.id}/{child}" for child in children)):
        info = (await client.get_workflow_handle(workflow).describe()).raw_description
        version = info.workflow_execution_info.versioning_info.deployment_version
        found.append(version.build_id)
    return found


async def runs_on(client: Client, run: Run, build: str) -> bool:
    return await builds_of(client, run) == [build]
