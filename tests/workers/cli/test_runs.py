"""The runs of a server, and the default of [RUN]."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from temporalio.client import Client, WorkflowHandle

from support.long_runs import LongRun, long_runs
from support.sums import write_sums
from support.waiting import until
from workers.cli.run import Launch, start_run
from workers.cli.run_file import load_run_file
from workers.cli.runs import Run, find_run, list_runs
from workers.cli.status import stop_run
from workers.connection import Server
from workers.errors import BadInputError, UserError

NAMESPACE = "runs"


async def listed(client: Client, **states: str) -> list[Run]:
    """Wait until the server lists runs in these states."""
    found: list[Run] = []

    async def as_expected() -> bool:
        found[:] = await list_runs(client)
        return {run.id: run.state for run in found} == states

    await until(as_expected, lambda: f"the server lists {found}, not {states}")
    return found


async def test_an_old_run_that_continues_as_new_is_not_the_newest(
    tmp_path: Path, temporal_server: str
) -> None:
    write_sums(tmp_path, 4)
    file = load_run_file(tmp_path / "run.json", [], tmp_path)
    server = Server(temporal_server, NAMESPACE)
    async with long_runs(temporal_server, NAMESPACE):
        client = await server.connect()
        at = f" --address {temporal_server} --namespace {NAMESPACE}"

        async def start(run_id: str) -> "WorkflowHandle[Any, Any]":
            _, handle = await start_run(Launch(file, run_id, server), client)
            return handle

        with pytest.raises(UserError, match=f"`everburn run CONFIG{at}`"):
            await find_run(server, client, None)
        older = await start("older")
        (began,) = await listed(client, older="running")
        assert (await find_run(server, client, None)).id == "older"
        await start("younger")
        await listed(client, older="running", younger="running")

        first = (await older.describe()).run_id
        await older.signal(LongRun.go_on)

        async def has_gone_on() -> bool:
            return (await older.describe()).run_id != first

        await until(has_gone_on, lambda: "the older run doesn't continue as new")
        # Its new execution is the last one started, and is listed first.
        runs = await listed(client, older="running", younger="running")
        assert [run.id for run in runs] == ["younger", "older"]
        assert runs[1].started == began.started < runs[0].started
        assert (await find_run(server, client, "older")).started == began.started

        with pytest.raises(BadInputError, match="2 runs are open: give one of older, younger"):
            await stop_run(server, None, False, Console())
        with pytest.raises(UserError, match=f"`everburn list{at}` shows them"):
            await find_run(server, client, "absent")
        output = StringIO()
        await stop_run(server, "younger", False, Console(file=output))
        assert f"see `everburn status younger{at}`" in output.getvalue()
        await listed(client, older="running", younger="completed")
        assert (await find_run(server, client, None)).id == "older"
        await stop_run(server, None, False, Console())
        await listed(client, older="completed", younger="completed")
        assert (await find_run(server, client, None)).id == "younger"
