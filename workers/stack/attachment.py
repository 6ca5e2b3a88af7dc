"""The local stack, as a command uses it: found or started, attached to, let go.

Owns the choice of ports and the start of the supervisor, which does the rest (supervisor.py).
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

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
"""Seconds for the supervisor to write down whether it stays: it does so at once where it can."""
OTHERS_TIMEOUT = 2.0
"""Seconds after which a supervisor that doesn't stop has other users."""

MAX_STARTS = 3
"""Stacks of two folders that start at once may choose the same ports."""

Say = Callable[[str], None]


class Stack:
    """An attachment to the stack of a folder. The stack stays up for as long as anybody has one."""

    def __init__(self, folder: StackFolder, lock: FolderLock, state: StackState, own: bool) -> None:
        self.folder = folder
        self.state = state
        self.started_here = own
        self._lock = lock
        self._log = folder.log("stack")
        # Somebody may have deleted it to make room.
        self._told = self._log.stat().st_size if self._log.exists() else 0
        self._told_of_its_end = False

    @classmethod
    def attach(cls, root: Path, ports: PortWishes, say: Say) -> "Stack":
        """Use the folder's stack; start it where none runs.

        Raises:
            BadInputError: a port that was asked for is taken.
            UserError: it can't be started; says why and where to look.
        """
        folder = StackFolder(root)
        folder.create()
        lock = FolderLock(folder.attached_lock)
        try:
            lock.share()
            state, own = _find_or_start(folder, ports, say)
            return cls(folder, lock, state, own)
        except BaseException:
            lock.close()
            raise

    @property
    def lives(self) -> bool:
        return self.state.lives

    def news(self) -> list[str]:
        """What the supervisor has said since it was asked last; once, that it is gone."""
        lines = self._said()
        if not self._told_of_its_end and not self.lives:
            self._told_of_its_end = True
            lines.append(
                "the local stack's supervisor is gone: what ends isn't started again; interrupt, "
                "and go on with `everburn resume RUN`"
            )
        return lines

    def _said(self) -> list[str]:
        try:
            with self._log.open("rb") as log:
                log.seek(self._told)
                *lines, rest = log.read().split(b"\n")
                self._told = log.tell() - len(rest)
        except OSError:
            return []
        return [line.decode(errors="replace") for line in lines]

    def description(self) -> list[str]:
        """Where its parts are."""
        state = self.state
        began = "started" if self.started_here else "in use already"
        return [
            f"local stack {began} (supervisor pid {state.supervisor.pid})",
            f"  Temporal   {state.temporal}",
            f"  UI         {state.ui}",
            f"  emulator   {state.emulator}",
            f"  logs       {self._shown(self.folder.logs)}",
        ]

    def follow(self, say: Say) -> None:
        """Pass on the supervisor's news for as long as it lives.

        Raises:
            UserError: it is gone.
        """
        while self.lives:
            for line in self._said():
                say(line)
            time.sleep(FOLLOW_POLL)
        raise UserError(f"the local stack has ended: see {self._shown(self._log)}")

    def leftover(self) -> list[str]:
        """What stays behind when this command leaves, and how to end it."""
        state = self.folder.find() or self.state
        pids = ", ".join(f"{name} {record.pid}" for name, record in state.services.items())
        return [
            f"the local stack runs on: supervisor {state.supervisor.pid}, {pids}",
            f"  end it:           kill {state.supervisor.pid}",
            f"  look after it:    {as_typed('everburn')} dev",
        ]

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self.folder.root))

    def stay(self) -> None:
        """Keep the stack up after its last user, until somebody takes it over or ends it."""
        self._set_stays(True)

    def take_over(self) -> None:
        """Let the stack end with its last user again."""
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
        """Let go, and wait until the stack is down, unless others use it."""
        self._lock.close()
        if not self.lives:
            # It was killed; its services must not outlive it. Those of a stack that another
            # command has started here since aren't its services.
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
        # It forgets its state when all services have ended, and ends itself a moment later.
        while self.lives:
            time.sleep(POLL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()


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
            supervisor = None  # another command's was faster
        elif ended is not None:
            failed = folder.last()
            if starts == MAX_STARTS or failed is None or not _lost_a_port(failed):
                raise UserError(f"the local stack didn't start: {_why(folder)}")
            supervisor = None
        time.sleep(POLL)


def _check_ports(ports: PortWishes, state: StackState) -> None:
    """Raises BadInputError where the living stack has other ports than those asked for."""
    has = (state.temporal_port, state.ui_port, state.emulator_port)
    for wish, port in zip(ports.wishes(), has, strict=True):
        if wish.asked not in (None, port):
            raise BadInputError(
                f"a stack runs in this folder already, with {wish.purpose} at port {port}: "
                f"stop it first, or leave out {wish.option}"
            )


def _lost_a_port(failed: StackState) -> bool:
    """Whether somebody took a port between our look at it and our server's."""
    ports = (failed.temporal_port, failed.ui_port, failed.emulator_port)
    return not all(is_free(port) for port in ports)


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
    order = StackOrder(
        root=folder.root,
        temporal=binary,
        temporal_port=chosen[0][0],
        ui_port=chosen[1][0],
        emulator_port=chosen[2][0],
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
