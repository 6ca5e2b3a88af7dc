"""HUD environments in their own processes.

A process is ended even if the worker that started it is dead: it is registered as a sandbox of its
completion before it starts, and found by a mark in the environment variables of it and its
children. Doesn't own its program (served.py).
"""

import asyncio
import os
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
from hud.environment.server import PORT_ANNOUNCEMENT
from hud.eval import Runtime, Task
from hud.utils.process import create_process_group_exec, finish_output, stream_output

from everburn.rollouts.contract import SandboxRegistry

MARK_ENV = "EVERBURN_HUD_ENVIRONMENT"
REAPER = "everburn.hud.processes:end"
START_TIMEOUT = 120.0
"""Seconds until an environment serves; HUD's default."""
STOP_TIMEOUT = 10.0
"""Seconds for an environment's shutdown, before it is killed."""
LONGEST_LINE = 2**20
"""Bytes per line of output."""


class EnvironmentStartError(RuntimeError):
    """An environment's process ended or timed out before it served."""


class OtherHostError(RuntimeError):
    """The process runs on another machine."""


class ProcessEnvironments:
    """The environments of a .py file or folder, each served by its own process, whose working
    folder is the source's."""

    def __init__(self, source: Path, sandboxes: SandboxRegistry) -> None:
        self._source = source
        self._sandboxes = sandboxes

    @asynccontextmanager
    async def __call__(self, task: Task) -> AsyncIterator[Runtime]:
        if task.runtime_config is not None:
            raise ValueError("a task with a runtime_config can't run in a local process")
        mark = uuid.uuid4().hex
        await self._sandboxes.register(REAPER, mark=mark, host=socket.gethostname())
        process = await create_process_group_exec(
            *(sys.executable, "-m", "everburn.hud.served", str(self._source), "--env", task.env),
            term_timeout=STOP_TIMEOUT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self._source if self._source.is_dir() else self._source.parent,
            env=os.environ | {MARK_ENV: mark},
            limit=LONGEST_LINE,
        )
        output = process.stdout
        assert output is not None
        drain: asyncio.Task[None] | None = None
        try:
            port = await self._port(output)
            drain = asyncio.create_task(stream_output(output, sys.stderr))
            yield Runtime(f"tcp://127.0.0.1:{port}")
        finally:
            await process.terminate()
            if drain is not None:
                await finish_output(drain)

    async def _port(self, output: asyncio.StreamReader) -> int:
        """Wait for the process to announce its port; its other output goes to the worker's log.

        Raises:
            EnvironmentStartError: with the last lines of the output.
        """
        last_lines: deque[str] = deque(maxlen=50)
        problem = "ended before it served"
        try:
            async with asyncio.timeout(START_TIMEOUT):
                while line := (await output.readline()).decode(errors="replace"):
                    _, announced, port = line.partition(PORT_ANNOUNCEMENT)
                    if announced:
                        return int(port)
                    sys.stderr.write(line)
                    last_lines.append(line)
        except TimeoutError:
            problem = f"doesn't serve after {START_TIMEOUT:g} s"
        output_text = "".join(last_lines).strip() or "(no output)"
        raise EnvironmentStartError(f"the environment of {self._source} {problem}:\n{output_text}")


def end(mark: str, host: str) -> None:
    """The reaper: terminate the marked processes; kill those that outlive STOP_TIMEOUT.

    Raises:
        OtherHostError: they were started on another machine.
    """
    this_host = socket.gethostname()
    if host != this_host:
        raise OtherHostError(f"it runs on {host}, not on {this_host}: run `everburn reap` there")
    deadline = time.monotonic() + STOP_TIMEOUT
    for process in marked(mark):
        _unless_gone(process.terminate)
    while remaining := list(marked(mark)):
        if time.monotonic() > deadline:
            for process in remaining:
                _unless_gone(process.kill)
        time.sleep(0.05)


def marked(mark: str) -> Iterator[psutil.Process]:
    """The running processes of this machine with the mark."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK_ENV) == mark:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _unless_gone(action: Callable[[], None]) -> None:
    with suppress(psutil.NoSuchProcess):
        action()
