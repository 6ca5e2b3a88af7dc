"""The lines that `everburn run` prints about other runs and at the end."""

import asyncio
import dataclasses
import os
import signal
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from support.long_runs import LongRun, long_runs
from support.sums import write_sums
from support.waiting import until
from workers.cli.run import Launch, RunLeft, start_and_follow, start_run
from workers.cli.run_file import RunFile, load_run_file
from workers.cli.runs import list_runs
from workers.cli.stale_code import stale_code
from workers.connection import Server
from workers.environment import as_typed
from workers.errors import BadInputError
from workers.stack.folder import ProcessRecord, StackState


def sums(folder: Path, *assignments: str) -> RunFile:
    write_sums(folder, 4)
    return load_run_file(folder / "run.json", list(assignments), folder)


def test_printed_commands_reach_the_same_server() -> None:
    """Everburn's commands find the folder's stack without options."""
    state = StackState(
        supervisor=ProcessRecord(pid=1, created=0.0), temporal_port=7, ui_port=8, emulator_port=9
    )
    for server, options in (
        (Server.of_stack(state), ""),
        (Server("host:7"), " --address host:7"),
        (Server("host:7", "ours"), " --address host:7 --namespace ours"),
    ):
        lines = RunLeft("first", signal.SIGINT).description(server, None)
        assert f"  see its status:   {as_typed('everburn')} status first{options}" in lines


async def test_an_unreadable_store_does_not_fail_a_completed_run(
    tmp_path: Path, temporal_server: str, uninstalled_store: str
) -> None:
    """Only the workers may have the store's library."""
    file = sums(tmp_path, f"store={uninstalled_store}")
    server = Server(temporal_server, "unread")
    at = f" --address {temporal_server} --namespace unread"
    output = StringIO()
    async with long_runs(temporal_server, "unread"):
        order = Launch(file, "unread", server)
        _, handle = await start_run(order, await server.connect())
        await handle.signal(LongRun.stop, {"drain": False})
        with pytest.raises(BadInputError, match=f"`everburn status unread{at}`"):
            await start_run(order, await server.connect())
        followed = dataclasses.replace(order, follows=True)
        assert await start_and_follow(followed, Console(file=output, width=200)) == 0
    assert "the evaluations can't be read from here: Install absentfs" in output.getvalue()
    assert "stopped after 3 steps on 6 rows in 0:07" in output.getvalue()


async def test_workers_with_older_code_are_reported_before_the_run_starts(
    tmp_path: Path, temporal_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, server, output = sums(tmp_path), Server(temporal_server, "stale"), StringIO()
    code = tmp_path / "sums.py"

    def edit(after: float) -> None:
        os.utime(code, (began + after, began + after))

    def stack(rollout: float, trainer: float) -> StackState:
        """A stack whose workers started this many seconds after the first run."""
        workers = {"orchestrator": (11, -60.0), "rollout": (12, rollout), "trainer": (13, trainer)}
        return StackState(
            supervisor=ProcessRecord(pid=1, created=0.0),
            temporal_port=7,
            ui_port=8,
            emulator_port=9,
            services={
                name: ProcessRecord(pid=pid, created=began + after)
                for name, (pid, after) in workers.items()
            },
        )

    async with long_runs(temporal_server, "stale"):
        client = await server.connect()

        async def note(found: StackState) -> str | None:
            return await stale_code(file.config, found, tmp_path, client)

        _, first = await start_run(Launch(file, "first", server), client)

        async def is_listed() -> bool:
            return len(await list_runs(client)) == 1

        await until(is_listed)
        (run,) = await list_runs(client)
        began = run.started.timestamp()
        up = stack(rollout=-20, trainer=-20)
        for after, why in ((-30, "they have what is there"), (-10, "no run was there before")):
            edit(after)
            assert await note(up) is None, why
        edit(10)
        assert await note(stack(rollout=20, trainer=20)) is None, "they were started again"
        assert "`kill 12`" in str(await note(stack(rollout=-20, trainer=20)))

        order = Launch(file, "second", server, used_stack=up)
        launching = asyncio.create_task(start_and_follow(order, Console(file=output, width=200)))
        await until(lambda: "run second" in output.getvalue())
        for handle in (first, client.get_workflow_handle("second")):
            await handle.signal(LongRun.stop, {"drain": False})
        assert await launching == 0
    note, started, *_ = output.getvalue().splitlines()
    assert note.startswith("sums.py changed after a run had started on these workers")
    assert "`kill 12 13` restarts them" in note
    assert started == "run second"
