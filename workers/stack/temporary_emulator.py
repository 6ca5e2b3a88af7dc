"""An emulator for commands that need one for a while and no workers: the stack's, else one of their
own for as long as it takes.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everburn.trainers.backends import EMULATOR_URL_ENV
from workers.errors import UserError
from workers.stack.folder import FolderLock, StackFolder
from workers.stack.ports import HOST, free_port, is_open
from workers.stack.supervisor import everburn_command

START_TIMEOUT = 180.0
"""Seconds: importing torch on a busy machine takes its time. One that dies is noticed at once."""


@contextmanager
def temporary_emulator(stack: StackFolder) -> Iterator[Path]:
    """The home of the emulator that holds this folder's checkpoints, while it serves. This
    process's sessions go to it.

    Raises:
        UserError: it doesn't start.
    """
    stack.create()
    with FolderLock(stack.attached_lock) as lock:
        lock.share()  # it doesn't stop while it is used here
        state = stack.find()
        if state is not None and state.phase == "running":
            os.environ[EMULATOR_URL_ENV] = state.emulator
            yield stack.emulator_home
            return
    port = free_port()
    command = everburn_command("emulator", "--port", str(port), "--home", str(stack.emulator_home))
    with stack.log("spare-emulator").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for(port, process, stack)
        os.environ[EMULATOR_URL_ENV] = f"http://{HOST}:{port}"
        yield stack.emulator_home
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int, process: "subprocess.Popen[bytes]", stack: StackFolder) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while not is_open(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise UserError(f"the emulator didn't start: see {stack.log('spare-emulator')}")
        time.sleep(0.1)
