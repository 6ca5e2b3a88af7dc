"""A running Temporal dev server for tests."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from temporalio.client import Client

from support.waiting import until
from workers.stack.ports import free_port
from workers.stack.temporal_server import find_binary, start_command

PROMPT_TIMERS = 'history.timerProcessorMaxTimeShift="10ms"'
"""By default, a server delays every timer, deadline and retry that is due within a second by up to
a second. Tests have such short timers, production doesn't."""


@contextmanager
def running_temporal(folder: Path, *settings: str) -> Iterator[str]:
    """The address of a server with Everburn's settings and additional ones (`key=value`)."""
    port, ui_port = free_port(), free_port()
    command = start_command(find_binary(), folder / "temporal.db", port, ui_port)
    for setting in (PROMPT_TIMERS, *settings):
        command += ["--dynamic-config-value", setting]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen([*command, "--log-level", "error"], stdout=log, stderr=log)
    address = f"127.0.0.1:{port}"
    try:
        asyncio.run(until(lambda: _serves(address), lambda: "the Temporal server doesn't come up"))
        yield address
    finally:
        server.terminate()
        server.wait()


async def _serves(address: str) -> bool:
    try:
        await Client.connect(address)
    except RuntimeError:
        return False
    return True
