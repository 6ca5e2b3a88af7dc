"""The folder `.everburn` of a local stack: its state, locks and logs.

Owns the files that commands and the supervisor of one folder share:

- `stack.json`: processes and ports. Valid only while the supervisor named in it lives.
- `attached.lock`: held shared by each command that uses the stack. The kernel releases it when the
  command ends in any way; when no command holds it, the supervisor stops the stack.
- `supervisor.lock`: held by the supervisor, so that there is only one.
"""

import contextlib
import fcntl
import os
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workers.stack.ports import HOST

STOP_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for a leftover process."""


class ProcessRecord(BaseModel):
    """A process by pid and creation time, since pids are reused."""

    model_config = ConfigDict(frozen=True)

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> "ProcessRecord":
        try:
            return cls(pid=pid, created=psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return cls(pid=pid, created=0.0)

    @property
    def process(self) -> psutil.Process | None:
        """The process, if it is alive."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.pid)
            same = found.create_time() == self.created
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        return None


class StackPorts(BaseModel):
    """The ports of a stack's servers, and their addresses."""

    temporal_port: int
    ui_port: int
    emulator_port: int

    @property
    def ports(self) -> tuple[int, int, int]:
        return self.temporal_port, self.ui_port, self.emulator_port

    @property
    def temporal(self) -> str:
        return f"{HOST}:{self.temporal_port}"

    @property
    def ui(self) -> str:
        return f"http://{HOST}:{self.ui_port}"

    @property
    def emulator(self) -> str:
        return f"http://{HOST}:{self.emulator_port}"


class StackState(StackPorts):
    """Processes and ports of a stack. phase: `starting`, `running`, `stopping` or `failed`. stays:
    keep running without attached commands."""

    supervisor: ProcessRecord
    phase: str = "starting"
    failure: str | None = None
    stays: bool = False
    services: dict[str, ProcessRecord] = Field(default_factory=dict)

    @property
    def lives(self) -> bool:
        return self.supervisor.process is not None


class StackFolder:
    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.path = self.root / ".everburn"
        self.logs = self.path / "logs"
        self.database = self.path / "temporal.db"
        self.emulator_home = self.path / "emulator"
        self.attached_lock = self.path / "attached.lock"
        self.supervisor_lock = self.path / "supervisor.lock"
        self._state = self.path / "stack.json"

    def create(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def begin_log(self, name: str) -> None:
        """Begin an empty log; the previous one is kept as `<name>.1.log`, since it may explain why
        the service was restarted."""
        with contextlib.suppress(FileNotFoundError):
            self.log(name).replace(self.log(f"{name}.1"))

    def find(self) -> StackState | None:
        """The state of the stack, if it is alive."""
        state = self.last()
        return state if state is not None and state.lives else None

    def last(self) -> StackState | None:
        """The last written state, even if its supervisor is gone."""
        try:
            return StackState.model_validate_json(self._state.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, state: StackState) -> None:
        draft = self._state.with_suffix(".partial")
        draft.write_text(state.model_dump_json(indent=1) + "\n")
        draft.replace(self._state)

    def forget(self) -> None:
        self._state.unlink(missing_ok=True)


class FolderLock:
    """A lock on a file, released when it is closed or when its process ends."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def share(self) -> None:
        """Hold it shared; waits while another holder has it exclusively."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def try_alone(self) -> bool:
        """Hold it exclusively; returns False if it is held already."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def release(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._descriptor)


def end_leftovers(state: StackState) -> None:
    """End the services of a killed supervisor, which hold ports and the database."""
    found = [record.process for record in state.services.values()]
    end_processes([process for process in found if process is not None])


def end_processes(processes: list[psutil.Process]) -> None:
    """Send SIGTERM, and after STOP_GRACE SIGKILL."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(processes, timeout=STOP_GRACE)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=STOP_GRACE)
