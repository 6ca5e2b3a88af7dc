"""`everburn verify`: a run of this folder against its own ledger.

Owns finding the run's folder, and what is said of it. Doesn't own the verification
(everburn/verification.py), nor the emulator on which it is re-executed (spare_emulator.py).
"""

import time
from pathlib import Path

from everburn.backends import on_shared_emulator
from everburn.refs import CONFIG_KEY, RunRef
from everburn.run_folder import stored_config
from everburn.store import ArtifactStore
from everburn.verification import VerificationError, Verified, check_records, verify
from workers.errors import BadInputError, UserError
from workers.spare_emulator import spare_emulator
from workers.stack_folder import StackFolder


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
    if not stored_config(run).local:
        raise BadInputError(
            f"run {run.id} trained at Fireworks: its records agree with each other, and weights "
            "can be compared bit for bit on the emulator only"
        )
    with spare_emulator(StackFolder(folder)) as home:
        try:
            return await _re_execute(run, home)
        except VerificationError as error:
            raise UserError(f"run {run.id} doesn't agree with its ledger: {error}") from None


async def _re_execute(run: RunRef, home: Path) -> Verified:
    from everburn.emulator.checkpoints import weights_digest
    from everburn.trainers import TrainerError
    from everburn.trainers.serverless import ServerlessTrainer

    config = on_shared_emulator(stored_config(run))
    try:
        return await verify(
            run,
            lambda: ServerlessTrainer.open(config),
            lambda path: weights_digest(home, path),
            name=f"verify-{time.time_ns()}",
        )
    except TrainerError as error:
        raise UserError(f"the run can't be re-executed: {error}") from None
