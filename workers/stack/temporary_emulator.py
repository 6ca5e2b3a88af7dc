"""An emulator for commands that need no workers: the running stack's, else a temporary one."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from everburn.trainers.backends import EMULATOR_URL_ENV
from workers.errors import UserError
from workers.stack.folder import FolderLock, StackFolder
from workers.stack.ports import HOST, free_port, is_open
from workers.stack.supervisor import everburn_command

START_TIMEOUT = 180.0
"""Seconds: importing torch on a busy machine is slow. An early exit is detected at once."""


@contextmanager
def temporary_emulator(stack: StackFolder) -> Iterator[Path]:
    """Serve this folder's checkpoints to this process in the block; yields their folder.

    Raises:
        UserError: the emulator doesn't start.
    """
    stack.create()
    with closing(FolderLock(stack.attached_lock)) as lock:
        lock.share()  # keeps the stack up
        state = stack.find()
        if state is not None and state.phase == "running":
            os.environ[EMULATOR_URL_ENV] = state.emulator
            yield stack.emulator_home
            return
    port = free_port()
    command = everburn_command("emulator", "--port", str(port), "--home", str(stack.emulator_home))
    with stack.log("temporary-emulator").open("ab") as log:
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
            raise UserError(f"the emulator didn't start: see {stack.log('temporary-emulator')}")
        time.sleep(0.1)
