"""`everburn verify`: checks a run against its own ledger.

Owns the printed result. Doesn't own the verification (everburn/records/verification.py) or the
emulator on which the ledger is re-executed (workers/stack/temporary_emulator.py).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from everburn.config import ConfigError, RunConfig
from everburn.records.ids import RunRef
from everburn.records.keys import CONFIG_KEY
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore, StoreError
from everburn.records.verification import VerificationError, Verified, check_records, verify
from everburn.trainers.backends import on_shared_emulator
from workers.environment import imports_from
from workers.errors import BadInputError, UserError
from workers.stack.folder import StackFolder
from workers.stack.temporary_emulator import temporary_emulator


async def verify_run(run: RunRef, folder: Path) -> Verified:
    """Check the ledger, re-execute it, compare weights.

    Raises:
        BadInputError: the run can't be re-executed on this machine.
        UserError: the run and its ledger differ; the message has the first difference.
    """
    with _differences_named(run):
        config = _config(run)
        check_records(run)
        if not config.local:
            raise BadInputError(
                f"run {run.id} trained at Fireworks: its records are consistent, but weights can "
                "be compared bit for bit on the emulator only"
            )
        # Re-execution calls a Python loss.
        with imports_from(folder), temporary_emulator(StackFolder(folder)) as home:
            return await _re_execute(run, config, home)


def described(run: RunRef, found: Verified) -> list[str]:
    """Lines about what was compared, and what couldn't be."""
    rows = f"{found.rows_trained} rows trained once, {found.rows_rejected} rejected"
    last = found.steps + found.uncompared
    if not last:
        lines = [f"run {run.id} has committed no step, so nothing was re-executed; {rows}"]
    elif not found.uncompared:
        lines = [
            f"run {run.id} agrees with its ledger: {last} steps re-executed, {rows}; "
            f"weights equal {found.weights}"
        ]
    else:
        lines = [
            f"run {run.id}: {last} steps re-executed, {rows}",
            f"weights after step {found.steps} equal {found.weights}"
            if found.steps
            else "no weights could be compared: the run saved no checkpoint after a step",
            f"not compared: steps {found.steps + 1} to {last} were re-executed, but no checkpoint "
            "has their weights",
        ]
    if found.outcomes.open:
        ending = found.outcomes.ending
        how = "no end recorded" if ending is None else f"its end: {ending}"
        lines.append(f"without an outcome so far ({how}): {found.outcomes.open_rows}")
    return lines


@contextmanager
def _differences_named(run: RunRef) -> Iterator[None]:
    try:
        yield
    except VerificationError as error:
        raise UserError(f"run {run.id} doesn't agree with its ledger: {error}") from None


def _config(run: RunRef) -> RunConfig:
    try:
        return stored_config(run)
    except (ConfigError, StoreError) as error:
        path = ArtifactStore.of(run).path(CONFIG_KEY)
        raise VerificationError(f"{path} is damaged: {error}") from None


def checkpoint_digest(home: Path, path: str) -> str:
    """The digest of the weights and optimizer of a checkpoint in the emulator's folder `home`.

    Raises VerificationError: it is missing or damaged.
    """
    from everburn.emulator.errors import EmulatorError
    from everburn.emulator.training.checkpoints import weights_digest

    try:
        return weights_digest(home, path)
    except (EmulatorError, OSError, ValueError) as error:
        raise VerificationError(f"checkpoint {path} can't be read: {error}") from None


async def _re_execute(run: RunRef, config: RunConfig, home: Path) -> Verified:
    from everburn.trainers.protocol import TrainerError
    from everburn.trainers.serverless import ServerlessTrainer

    session = on_shared_emulator(config)
    try:
        return await verify(
            run,
            lambda: ServerlessTrainer.open(session),
            partial(checkpoint_digest, home),
            name=f"verify-{time.time_ns()}",
        )
    except TrainerError as error:
        raise UserError(f"the run can't be re-executed: {error}") from None
