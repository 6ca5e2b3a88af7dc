"""`everburn verify`: a run of this folder against its own ledger.

Owns finding the run's folder and an emulator to re-execute it on: the stack's, else one of its own
for as long as it takes. Doesn't own the verification (everburn/verification.py).
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everburn.backends import EMULATOR_URL_ENV
from everburn.refs import CONFIG_KEY, RunRef
from everburn.run_folder import stored_config
from everburn.store import ArtifactStore
from everburn.verification import VerificationError, Verified, check_records, verify
from workers.errors import BadInputError, UserError
from workers.ports import HOST, free_port, is_open
from workers.stack_folder import StackFolder
from workers.supervisor import everburn_command

START_TIMEOUT = 60.0
"""Seconds: importing torch on a busy machine takes its time."""


async def verify_run(run: RunRef, folder: Path) -> Verified:
    """Check the ledger, re-execute it, compare weights.

    Raises:
        BadInputError: there is no such run here, or it can't be re-executed on this machine.
        UserError: the run and its ledger differ; says where first.
    """
    if not ArtifactStore.of(run).exists(CONFIG_KEY):
        raise BadInputError(f"there is no run in {run.folder}")
    try:
        check_records(run)
    except VerificationError as error:
        raise UserError(f"run {run.id} doesn't agree with its ledger: {error}") from None
    if stored_config(run).backend != "emulator":
        raise BadInputError(
            f"run {run.id} trained at Fireworks: its records agree with each other, and weights "
            "can be compared bit for bit on the emulator only"
        )
    with _emulator(StackFolder(folder)) as home:
        try:
            return await _re_execute(run, home)
        except VerificationError as error:
            raise UserError(f"run {run.id} doesn't agree with its ledger: {error}") from None


async def _re_execute(run: RunRef, home: Path) -> Verified:
    from everburn.emulator.checkpoints import weights_digest
    from everburn.trainers import TrainerError
    from everburn.trainers.serverless import ServerlessTrainer

    config = stored_config(run)
    try:
        return await verify(
            run,
            lambda: ServerlessTrainer.open(config),
            lambda path: weights_digest(home, path),
            name=f"verify-{time.time_ns()}",
        )
    except TrainerError as error:
        raise UserError(f"the run can't be re-executed: {error}") from None


@contextmanager
def _emulator(stack: StackFolder) -> Iterator[Path]:
    """The home of the emulator that holds this folder's checkpoints, while it serves."""
    state = stack.find()
    if state is not None:
        os.environ[EMULATOR_URL_ENV] = state.emulator
        yield stack.emulator_home
        return
    stack.create()
    port = free_port()
    command = everburn_command("emulator", "--port", str(port), "--home", str(stack.emulator_home))
    with stack.log("verify-emulator").open("ab") as log:
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
            raise UserError(f"the emulator didn't start: see {stack.log('verify-emulator')}")
        time.sleep(0.1)
