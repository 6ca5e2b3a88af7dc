"""Real processes for benchmarks: a Temporal server in a temporary folder, and workers.

Owns their start, kill, restart and end, and the CPU time each has used, also over restarts.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from temporalio.client import Client

from workers.ports import HOST, free_port
from workers.processes import connect
from workers.supervisor import everburn_command
from workers.temporal_server import find_binary, start_command

ROOT = Path(__file__).parents[1]


class Processes:
    """Named processes and their commands."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self._environment = os.environ | {"TINKER_TELEMETRY": "0"} | (environment or {})
        self._commands: dict[str, list[str]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended_cpu: dict[str, float] = {}

    def start(self, name: str, command: list[str] | None = None) -> None:
        """Start a process, again by its name alone."""
        if command is not None:
            self._commands[name] = command
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                self._commands[name], cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        """As a crash: SIGKILL."""
        self._end(name, signal.SIGKILL)

    def stop_all(self) -> None:
        """Those started last go first."""
        for name in reversed(list(self._running)):
            self._end(name, signal.SIGTERM)

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of each, user and system, since it was first started."""
        return {
            name: self._ended_cpu.get(name, 0.0) + _cpu(process)
            for name, process in self._running.items()
        }

    def _end(self, name: str, number: signal.Signals) -> None:
        process = self._running.pop(name)
        self._ended_cpu[name] = self._ended_cpu.get(name, 0.0) + _cpu(process)
        process.send_signal(number)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _cpu(process: "subprocess.Popen[bytes]") -> float:
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


@asynccontextmanager
async def temporal(folder: Path) -> AsyncIterator[tuple[Processes, Client, str]]:
    """A server of its own, with the settings that `everburn dev` gives it; and a client."""
    port = free_port()
    address = f"{HOST}:{port}"
    processes = Processes(folder)
    processes.start(
        "temporal", start_command(find_binary(), folder / "temporal.db", port, free_port())
    )
    try:
        yield processes, await _connected(address), address
    finally:
        processes.stop_all()


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
