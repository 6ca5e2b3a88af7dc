"""The command line as real processes, each test in its own folder."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from support.waiting import pauses
from workers.stack.ports import free_port

ROOT = Path(__file__).parents[2]
OUTER = (
    "TEMPORAL_ADDRESS",
    "TEMPORAL_NAMESPACE",
    "FIREWORKS_API_KEY",
    "EVERBURN_EMULATOR_URL",
    "EVERBURN_BUILD_ID",
)
"""Environment variables of the tests' caller that would change the tests' behavior."""
PATIENCE = 240.0
"""Seconds for a command or its effect: it may have to start a stack first, which may take half of
them (workers/stack/supervisor.py)."""


class Everburn:
    """The `everburn` command in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self._output: Path | None = None

    def __call__(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a command and wait for its end."""
        return subprocess.run(
            self._command(*arguments),
            cwd=self.folder,
            env=environment_of_tests() | environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        """Start a command; its output goes to its own file."""
        self._output = self.folder / f"output-{len(self._started)}.txt"
        with self._output.open("w") as output:
            process = subprocess.Popen(
                self._command(*arguments),
                cwd=self.folder,
                env=environment_of_tests() | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
                preexec_fn=_listen_to_interrupts,
            )
        self._started.append(process)
        return process

    @property
    def output(self) -> str:
        """The output of the command that was started last."""
        assert self._output is not None
        return self._output.read_text()

    def told(self) -> str:
        """The output and the end of each log of the stack, for a failure's message."""
        parts = [self.output]
        for log in sorted((self.folder / ".everburn" / "logs").glob("*.log")):
            parts.append(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}")
        return "\n".join(parts)

    def processes(self) -> list[psutil.Process]:
        """All processes in the folder: commands, the stack, and their children."""
        found = []
        for process in psutil.process_iter(["cwd"]):
            if process.info["cwd"] == str(self.folder):
                found.append(process)
        return found

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        try:
            wait_until(lambda: not self.processes(), "the folder's processes to end")
        finally:
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "workers.cli.app", *arguments]


def _listen_to_interrupts() -> None:
    # A shell script's background jobs ignore SIGINT; the tests may be such a job.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def free_ports() -> list[str]:
    """Options with a free port for each server of a stack."""
    return [f"--{name}={free_port()}" for name in ("port", "ui-port", "emulator-port")]


def environment_of_tests() -> dict[str, str]:
    """The environment of the project's processes, without variables that change their behavior."""
    kept = {name: value for name, value in os.environ.items() if name not in OUTER}
    paths = [str(ROOT), kept.get("PYTHONPATH", "")]
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def wait_until(condition: Callable[[], object], what: str, timeout: float = PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    for pause in pauses():
        if condition():
            return
        assert time.monotonic() < deadline, f"waited {timeout:.0f} s for {what}"
        time.sleep(pause)
