"""Real processes for benchmarks and chaos tests: servers and workers in a temporary folder.

Owns their start, kill, restart and end, their memory, and the CPU time each has used, also over
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
"""Seconds for a server to answer: importing torch on a busy machine takes its time."""


@dataclass(frozen=True)
class Death:
    """A process that ended though nobody stopped it; `at` is in seconds since 1970."""

    name: str
    at: float


class Processes:
    """Named processes and their commands."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.deaths: list[Death] = []
        """Of processes that are kept up or were killed, in order."""
        # Found by every process, whatever the folder it starts in.
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
        """Start a process, again by its name alone."""
        if command is not None:
            self._commands[name] = command
        self._stopped.discard(name)
        with self.log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                self._commands[name], cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        """As a crash: SIGKILL.

        Raises:
            RuntimeError: it is down already.
        """
        if name not in self._running:
            raise RuntimeError(f"{name} is down already; what it said: {self.log(name)}")
        self._end(name, signal.SIGKILL)
        self.deaths.append(Death(name, time.time()))

    def stop(self, name: str) -> None:
        """End a process in peace; one that has died isn't started again."""
        self._stopped.add(name)
        if name in self._running:
            self._end(name, signal.SIGTERM)

    def stop_all(self) -> None:
        """Those started last go first."""
        for name in reversed(list(self._running)):
            self.stop(name)

    def thaw(self, name: str) -> None:
        """Let a process go on that has stopped itself."""
        self._running[name].send_signal(signal.SIGCONT)

    def is_up(self, name: str) -> bool:
        process = self._running.get(name)
        return process is not None and process.poll() is None

    def frozen(self) -> list[str]:
        """Those that have stopped themselves."""
        return [name for name, process in self._running.items() if _is_stopped(process.pid)]

    @contextmanager
    def kept_up(self, delay: float = 1.0) -> Iterator[None]:
        """Whatever dies, and wasn't stopped, starts again `delay` seconds later.

        Raises, at the end, whatever has kept a process from being started again.
        """
        self._keeping = asyncio.create_task(self._keep_up(delay, len(self.deaths)))
        try:
            yield
            self.check()
        finally:
            self._keeping.cancel()
            self._keeping = None

    def check(self) -> None:
        """Raise what has put an end to keeping up, if anything has."""
        if self._keeping is not None and self._keeping.done():
            self._keeping.result()

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of each, user and system, since it was first started."""
        return {
            name: self._ended_cpu.get(name, 0.0) + _cpu(process)
            for name, process in self._running.items()
        }

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of each that runs."""
        return {
            name: psutil.Process(process.pid).memory_info().rss / 2**20
            for name, process in self._running.items()
        }

    def log(self, name: str) -> Path:
        """What the process has said."""
        return self.folder / f"{name}.log"

    async def _keep_up(self, delay: float, seen: int) -> None:
        """seen: deaths that are none of its business."""
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
        process.send_signal(signal.SIGCONT)  # a frozen process hears no other signal
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
    """A server of its own, with the settings that `everburn dev` gives it, and more where a test
    wants them (`KEY=VALUE`); and a client."""
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
    """All of Everburn's processes in a folder: the servers, and a worker of each role."""

    processes: Processes
    client: Client
    address: str
    emulator_url: str
    emulator_home: Path

    async def answers(self) -> None:
        """Return once both servers answer, after whatever happened to them. Raises what keeps
        processes from being started again, if anything does."""
        self.processes.check()
        for url in (self.address, self.emulator_url.removeprefix("http://")):
            port = int(url.rpartition(":")[2])
            await _until(lambda: is_open(port), url)  # noqa: B023


async def result_of(handle: WorkflowHandle[Any, T], patience: float) -> T:
    """A workflow's result, through restarts of its server.

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
    """Return once the condition holds of a running workflow.

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
                    raise RuntimeError(f"{handle.id} has ended before what was waited for")
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
    """A stack for as long as the block runs. command: makes the command line of Everburn's own
    processes from `everburn`'s arguments. worst: the emulator does the worst that the live service
    may do, for all we know, also after a restart (everburn/emulator/unknowns.py)."""
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
    """`everburn worker ROLE`."""
    return everburn_command("worker", role, "--address", address)


def simulated_trainer_command(address: str) -> list[str]:
    """A trainer worker whose sessions wait instead of computing."""
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
