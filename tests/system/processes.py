"""Real processes for benchmarks and chaos tests: servers and workers in a temporary folder.

Owns their start, kill, restart and stop, and measures their memory and their CPU time, also across
restarts.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError

from everburn.trainers.backends import EMULATOR_URL_ENV
from workers.connection import connect
from workers.environment import BUILD_ID_ENV
from workers.stack.ports import HOST, free_port, is_open
from workers.stack.supervisor import everburn_command
from workers.stack.temporal_server import find_binary, start_command

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
ROLES = ("orchestrator", "rollout", "trainer")
PATIENCE = 120.0
"""Seconds for a server to answer: importing torch on a busy machine is slow."""


@dataclass(frozen=True)
class Death:
    """The end of a process that wasn't stopped. at: seconds since 1970."""

    name: str
    at: float


class Processes:
    """Named processes and their commands."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.deaths: list[Death] = []
        """Deaths of killed processes, and of all while they are kept up, in order."""
        # Absolute paths, valid in every process's working directory.
        folders = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]
        paths = os.pathsep.join(filter(None, folders))
        self._environment = (
            os.environ
            | {"TINKER_TELEMETRY": "0", BUILD_ID_ENV: "", "PYTHONPATH": paths}
            | (environment or {})
        )
        self._commands: dict[str, list[str]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended_cpu: dict[str, float] = {}
        self._stopped: set[str] = set()
        self._keeping: asyncio.Task[None] | None = None

    def start(self, name: str, command: list[str] | None = None) -> None:
        """Start a process; a restart needs only its name."""
        if command is not None:
            self._commands[name] = command
        self._stopped.discard(name)
        with self.log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                self._commands[name], cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        """Send SIGKILL, like a crash.

        Raises:
            RuntimeError: it is down already.
        """
        if name not in self._running:
            raise RuntimeError(f"{name} is down already; its output: {self.log(name)}")
        self._end(name, signal.SIGKILL)
        self.deaths.append(Death(name, time.time()))

    def stop(self, name: str) -> None:
        """Terminate a process; if it is down, prevent its restart."""
        self._stopped.add(name)
        if name in self._running:
            self._end(name, signal.SIGTERM)

    def stop_all(self) -> None:
        """Stop all processes, in reverse order of their start."""
        for name in reversed(list(self._running)):
            self.stop(name)

    def thaw(self, name: str) -> None:
        """Continue a process that has suspended itself."""
        self._running[name].send_signal(signal.SIGCONT)

    def is_up(self, name: str) -> bool:
        process = self._running.get(name)
        return process is not None and process.poll() is None

    def frozen(self) -> list[str]:
        """The processes that have suspended themselves."""
        return [name for name, process in self._running.items() if _is_stopped(process.pid)]

    @contextmanager
    def kept_up(self, delay: float = 1.0) -> Iterator[None]:
        """Restart processes that die without being stopped, after `delay` seconds.

        Raises, at the end, the error of a failed restart.
        """
        self._keeping = asyncio.create_task(self._keep_up(delay, len(self.deaths)))
        try:
            yield
            self.check()
        finally:
            self._keeping.cancel()
            self._keeping = None

    def check(self) -> None:
        """Raise the error of a failed restart, if any."""
        if self._keeping is not None and self._keeping.done():
            self._keeping.result()

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time per process, user and system, since its first start."""
        return {
            name: self._ended_cpu.get(name, 0.0) + _cpu(process)
            for name, process in self._running.items()
        }

    def memory_mib(self) -> dict[str, float]:
        """Resident memory per running process."""
        return {
            name: psutil.Process(process.pid).memory_info().rss / 2**20
            for name, process in self._running.items()
        }

    def log(self, name: str) -> Path:
        """The file with the process's output."""
        return self.folder / f"{name}.log"

    async def _keep_up(self, delay: float, seen: int) -> None:
        """seen: number of earlier deaths, which are ignored."""
        due: dict[str, float] = {}
        while True:
            for name, process in list(self._running.items()):
                if process.poll() is not None:
                    del self._running[name]
                    self.deaths.append(Death(name, time.time()))
            for death in self.deaths[seen:]:
                due[death.name] = death.at + delay
            seen = len(self.deaths)
            for name in [name for name, at in due.items() if time.time() >= at]:
                del due[name]
                if name not in self._stopped:
                    self.start(name)
            await asyncio.sleep(0.02)

    def _end(self, name: str, number: signal.Signals) -> None:
        process = self._running.pop(name)
        self._ended_cpu[name] = self._ended_cpu.get(name, 0.0) + _cpu(process)
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)  # a suspended process handles no other signal
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _cpu(process: "subprocess.Popen[bytes]") -> float:
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


@asynccontextmanager
async def temporal(
    folder: Path,
    environment: dict[str, str] | None = None,
    dynamic_config: Sequence[str] = (),
) -> AsyncIterator[tuple[Processes, Client, str]]:
    """A Temporal server with the settings of `everburn dev` and additional ones (`KEY=VALUE`), and
    a client."""
    port = free_port()
    address = f"{HOST}:{port}"
    processes = Processes(folder, environment)
    command = start_command(find_binary(), folder / "temporal.db", port, free_port())
    for setting in dynamic_config:
        command += ["--dynamic-config-value", setting]
    processes.start("temporal", command)
    try:
        yield processes, await _connected(address), address
    finally:
        processes.stop_all()


@dataclass(frozen=True)
class Stack:
    """All of Everburn's processes in a folder: the servers and one worker per role."""

    processes: Processes
    client: Client
    address: str
    emulator_url: str
    emulator_home: Path

    async def answers(self) -> None:
        """Wait until both servers answer. Raises the error of a failed restart, if any."""
        self.processes.check()
        for url in (self.address, self.emulator_url.removeprefix("http://")):
            port = int(url.rpartition(":")[2])
            await _until(lambda: is_open(port), url)  # noqa: B023


async def result_of(handle: WorkflowHandle[Any, T], patience: float) -> T:
    """A workflow's result, across restarts of its server.

    Raises:
        TimeoutError: not within `patience` seconds.
        WorkflowFailureError
    """
    async with asyncio.timeout(patience):
        while True:
            try:
                return await handle.result()
            except RPCError:
                await asyncio.sleep(0.5)


async def until_of(
    handle: WorkflowHandle[Any, Any], condition: Callable[[], Awaitable[bool]], interval: float
) -> None:
    """Wait until the condition holds for a running workflow.

    Raises:
        WorkflowFailureError: the workflow failed before.
        RuntimeError: it ended before.
    """
    ending = asyncio.create_task(handle.result())
    try:
        while not await condition():
            await asyncio.wait([ending], timeout=interval)
            if ending.done():
                await ending
                if not await condition():
                    raise RuntimeError(f"{handle.id} ended before the condition held")
    finally:
        ending.cancel()


@asynccontextmanager
async def stack(
    folder: Path,
    command: Callable[..., list[str]] = everburn_command,
    environment: dict[str, str] | None = None,
    dynamic_config: Sequence[str] = (),
    *,
    worst: bool = False,
) -> AsyncIterator[Stack]:
    """A stack that runs during the block. command: turns `everburn` arguments into the command line
    of Everburn's own processes. worst: where the live service's behavior is unknown, the emulator
    assumes the worst, also after a restart (everburn/emulator/unknowns.py)."""
    port, home = free_port(), folder / "emulator"
    url = f"http://{HOST}:{port}"
    given = {EMULATOR_URL_ENV: url} | (environment or {})
    async with temporal(folder, given, dynamic_config) as (processes, client, address):
        served = ["emulator", "--port", str(port), "--home", str(home), "--enable-faults"]
        processes.start("emulator", command(*served, *(["--worst"] if worst else [])))
        for role in ROLES:
            processes.start(role, command("worker", role, "--address", address))
        await _until(lambda: is_open(port), "the emulator")
        yield Stack(processes, client, address, url, home)


def worker_command(role: str, address: str) -> list[str]:
    """The command line of `everburn worker ROLE`."""
    return everburn_command("worker", role, "--address", address)


def simulated_trainer_command(address: str) -> list[str]:
    """The command line of a trainer worker whose sessions wait instead of computing."""
    return [sys.executable, "-m", "benchmarks.simulation", "trainer", address]


async def _connected(address: str) -> Client:
    for _ in range(300):
        try:
            return await connect(address, "default")
        except RuntimeError:
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the Temporal server at {address} didn't start")


async def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} didn't start within {PATIENCE:.0f} s")
        await asyncio.sleep(0.1)
