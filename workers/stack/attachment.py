"""The local stack as a command uses it: find or start it, attach, detach.

Owns the choice of ports and the start of the supervisor, which does the rest (supervisor.py).
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from workers import dotenv
from workers.environment import as_typed
from workers.errors import BadInputError, UserError
from workers.stack.folder import FolderLock, StackFolder, StackState, end_leftovers
from workers.stack.ports import PortWishes, choose, is_free
from workers.stack.supervisor import StackOrder
from workers.stack.temporal_server import find_binary

POLL = 0.1
FOLLOW_POLL = 0.5
STAY_TIMEOUT = 10.0
"""Seconds for the supervisor to record whether it stays; usually it does so at once."""
OTHERS_TIMEOUT = 2.0
"""Seconds after which a supervisor that doesn't stop must have other users."""

MAX_STARTS = 3
"""Stacks of two folders that start at once may choose the same ports."""

Say = Callable[[str], None]


class Stack:
    """An attachment to a folder's stack, which stays up while at least one exists."""

    def __init__(self, folder: StackFolder, lock: FolderLock, state: StackState, own: bool) -> None:
        self.folder = folder
        self.state = state
        self.started_here = own
        self._lock = lock
        self._log = folder.log("stack")
        # A user may have deleted the log to free space.
        self._read = self._log.stat().st_size if self._log.exists() else 0
        self._end_reported = False

    @classmethod
    @contextmanager
    def attach(cls, root: Path, ports: PortWishes, say: Say) -> Iterator["Stack"]:
        """Use the folder's stack in the block; start it if none runs.

        Raises:
            BadInputError: a requested port is in use.
            UserError: the stack can't be started; the message says why.
        """
        folder = StackFolder(root)
        folder.create()
        lock = FolderLock(folder.attached_lock)
        try:
            lock.share()
            stack = cls(folder, lock, *_find_or_start(folder, ports, say))
        except BaseException:
            lock.close()
            raise
        try:
            yield stack
        finally:
            stack.detach()

    @property
    def lives(self) -> bool:
        return self.state.lives

    def news(self) -> list[str]:
        """New lines of the supervisor; once, also that it is gone."""
        lines = self._new_lines()
        if not self._end_reported and not self.lives:
            self._end_reported = True
            lines.append(
                "the local stack's supervisor is gone, so services that end aren't restarted: "
                "interrupt, and continue with `everburn resume RUN`"
            )
        return lines

    def _new_lines(self) -> list[str]:
        try:
            with self._log.open("rb") as log:
                log.seek(self._read)
                *lines, rest = log.read().split(b"\n")
                self._read = log.tell() - len(rest)
        except OSError:
            return []
        return [line.decode(errors="replace") for line in lines]

    def description(self) -> list[str]:
        """The stack's addresses and folders."""
        state = self.state
        began = "started" if self.started_here else "already running"
        return [
            f"local stack {began} (supervisor pid {state.supervisor.pid})",
            f"  Temporal   {state.temporal}",
            f"  UI         {state.ui}",
            f"  emulator   {state.emulator}",
            f"  logs       {self._shown(self.folder.logs)}",
        ]

    def follow(self, say: Say) -> None:
        """Print the supervisor's lines while it is alive.

        Raises:
            UserError: the supervisor is gone.
        """
        while self.lives:
            for line in self._new_lines():
                say(line)
            time.sleep(FOLLOW_POLL)
        raise UserError(f"the local stack has ended: see {self._shown(self._log)}")

    def leftover(self) -> list[str]:
        """What keeps running after this command, and how to end it."""
        state = self.folder.find() or self.state
        pids = ", ".join(f"{name} {record.pid}" for name, record in state.services.items())
        return [
            f"the local stack keeps running: supervisor {state.supervisor.pid}, {pids}",
            f"  end it:           kill {state.supervisor.pid}",
            f"  attach to it:     {as_typed('everburn')} dev",
        ]

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self.folder.root))

    def stay(self) -> None:
        """Keep the stack up without attached commands, until `take_over` or a signal."""
        self._set_stays(True)

    def take_over(self) -> None:
        """Let the stack stop with its last attached command again."""
        self._set_stays(False)

    def _set_stays(self, stays: bool) -> None:
        supervisor = self.state.supervisor.process
        if supervisor is not None:
            supervisor.send_signal(signal.SIGUSR1 if stays else signal.SIGUSR2)
        deadline = time.monotonic() + STAY_TIMEOUT
        while (state := self.folder.find()) is not None and state.stays != stays:
            if time.monotonic() > deadline:
                return
            time.sleep(POLL)

    def detach(self) -> None:
        """Release the stack, and wait until it has stopped unless others use it."""
        self._lock.close()
        if not self.lives:
            # The supervisor was killed: end its services, unless the state is already that of a
            # newer stack.
            left = self.folder.last() or self.state
            if not left.lives:
                end_leftovers(left)
            return
        asked = time.monotonic()
        while (state := self.folder.find()) is not None:
            others = state.phase != "stopping" and time.monotonic() - asked > OTHERS_TIMEOUT
            if state.stays or others:
                return
            time.sleep(POLL)
        # The supervisor deletes its state when all services have ended, and ends shortly after.
        while self.lives:
            time.sleep(POLL)


def _find_or_start(folder: StackFolder, ports: PortWishes, say: Say) -> tuple[StackState, bool]:
    supervisor: subprocess.Popen[bytes] | None = None
    starts = 0
    while True:
        state = folder.find()
        if state is not None and state.phase == "running":
            _check_ports(ports, state)
            return state, supervisor is not None
        if state is None and supervisor is None:
            supervisor = _start_supervisor(folder, ports, say)
            starts += 1
        ended = None if supervisor is None else supervisor.poll()
        if ended == 0:
            supervisor = None  # the supervisor of another command was faster
        elif ended is not None:
            failed = folder.last()
            if starts == MAX_STARTS or failed is None or not _lost_a_port(failed):
                raise UserError(f"the local stack didn't start: {_why(folder)}")
            supervisor = None
        time.sleep(POLL)


def _check_ports(ports: PortWishes, state: StackState) -> None:
    """Raises BadInputError: the running stack has other ports than requested."""
    for wish, port in zip(ports.wishes(), state.ports, strict=True):
        if wish.asked not in (None, port):
            raise BadInputError(
                f"a stack is already running in this folder, with {wish.purpose} at port {port}: "
                f"stop it first, or omit {wish.option}"
            )


def _lost_a_port(failed: StackState) -> bool:
    """True if another process took a port between our check and our server's start."""
    return not all(is_free(port) for port in failed.ports)


def _start_supervisor(
    folder: StackFolder, ports: PortWishes, say: Say
) -> "subprocess.Popen[bytes]":
    binary = find_binary()
    if (previous := folder.last()) is not None:
        end_leftovers(previous)
    chosen = [choose(wish) for wish in ports.wishes()]
    for _, note in chosen:
        if note is not None:
            say(note)
    say("starting the local stack ...")
    temporal, ui, emulator = (port for port, _ in chosen)
    order = StackOrder(
        root=folder.root,
        binary=binary,
        temporal_port=temporal,
        ui_port=ui,
        emulator_port=emulator,
    )
    with folder.log("stack").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "workers.stack.supervisor", order.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder.root,
            env=dotenv.outer_environment() | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )


def _why(folder: StackFolder) -> str:
    state = folder.last()
    if state is not None and state.failure is not None:
        return state.failure
    return f"see {folder.log('stack')}"
