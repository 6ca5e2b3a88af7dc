"""What a person is told who stays with a run."""

import dataclasses
from io import StringIO
from pathlib import Path

from rich.console import Console

from support.long_runs import LongRun, long_runs
from support.sums import write_sums
from workers.launch import Launch, launch, start_run
from workers.run_file import RunFile, load_run_file
from workers.server import Server

NAMESPACE = "launch"


def sums(folder: Path, *assignments: str) -> RunFile:
    write_sums(folder, 4)
    return load_run_file(folder / "run.json", list(assignments), folder)


async def test_a_store_that_cannot_be_read_here_makes_no_completed_run_fail(
    tmp_path: Path, temporal_server: str, uninstalled_store: str
) -> None:
    """The workers may have what it needs, and this environment not."""
    file = sums(tmp_path, f"store={uninstalled_store}")
    server = Server(temporal_server, NAMESPACE)
    output = StringIO()
    async with long_runs(temporal_server, NAMESPACE):
        order = Launch(file, "unread", server)
        _, handle = await start_run(order, await server.connect())
        await handle.signal(LongRun.stop, {"drain": False})
        followed = dataclasses.replace(order, follows=True)
        assert await launch(followed, Console(file=output, width=200)) == 0
    assert "the evaluations can't be read from here: Install absentfs" in output.getvalue()
    assert "stopped after 3 steps on 6 rows in 0:07" in output.getvalue()
