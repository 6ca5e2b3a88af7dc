"""What a person is told who stays with a run."""

import dataclasses
import signal
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from support.long_runs import LongRun, long_runs
from support.sums import write_sums
from workers.errors import BadInputError
from workers.launch import Launch, RunLeft, launch, start_run
from workers.run_file import RunFile, load_run_file
from workers.scripts import as_typed
from workers.server import Server
from workers.stack_folder import ProcessRecord, StackState

NAMESPACE = "launch"


def sums(folder: Path, *assignments: str) -> RunFile:
    write_sums(folder, 4)
    return load_run_file(folder / "run.json", list(assignments), folder)


def test_commands_that_are_named_reach_the_same_server() -> None:
    """Those of ours find the folder's stack by themselves, wherever its ports are."""
    state = StackState(
        supervisor=ProcessRecord(pid=1, created=0.0), temporal_port=7, ui_port=8, emulator_port=9
    )
    for server, options in (
        (Server.of_stack(state), ""),
        (Server("host:7"), " --address host:7"),
        (Server("host:7", "ours"), " --address host:7 --namespace ours"),
    ):
        lines = RunLeft("first", signal.SIGINT).description(server, None)
        assert f"  see where it is:  {as_typed('everburn')} status first{options}" in lines


async def test_a_store_that_cannot_be_read_here_makes_no_completed_run_fail(
    tmp_path: Path, temporal_server: str, uninstalled_store: str
) -> None:
    """The workers may have what it needs, and this environment not."""
    file = sums(tmp_path, f"store={uninstalled_store}")
    server = Server(temporal_server, NAMESPACE)
    at = f" --address {temporal_server} --namespace {NAMESPACE}"
    output = StringIO()
    async with long_runs(temporal_server, NAMESPACE):
        order = Launch(file, "unread", server)
        _, handle = await start_run(order, await server.connect())
        await handle.signal(LongRun.stop, {"drain": False})
        with pytest.raises(BadInputError, match=f"`everburn status unread{at}`"):
            await start_run(order, await server.connect())
        followed = dataclasses.replace(order, follows=True)
        assert await launch(followed, Console(file=output, width=200)) == 0
    assert "the evaluations can't be read from here: Install absentfs" in output.getvalue()
    assert "stopped after 3 steps on 6 rows in 0:07" in output.getvalue()
