"""`everburn reap`: clean up the sandboxes, trainer job and deployment of a run that has ended.

Owns the check that the run has ended. Doesn't own reaping (everburn/rollouts/sandboxes.py) or the
cleanup of jobs (everburn/trainers/jobs.py).
"""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from everburn.config import RunConfig
from everburn.records.ids import RunRef
from everburn.records.provisioning import find_provisioning
from everburn.records.store import ArtifactStore
from everburn.rollouts.sandboxes import Reaped, reap
from everburn.trainers.backends import EMULATOR_URL_ENV, UnreachableError, api_root, check_reachable
from workers import dotenv
from workers.cli.resume import known_run
from workers.cli.runs import require_ended
from workers.connection import Server
from workers.environment import imports_from
from workers.errors import UserError
from workers.stack.folder import StackFolder


@dataclass(frozen=True)
class Cleaned:
    """provisions: what was done with the run's job and deployment, if it had any; problem: why they
    may be left."""

    run: RunRef
    reaped: Reaped
    provisions: str = ""
    problem: str = ""


async def reap_run(
    name: str, address: str | None, namespace: str, folder: Path, *, ended: bool = False
) -> Cleaned:
    """Reap the sandboxes of a run in this process, and clean up its job and deployment as its
    configuration says.

    ended: the user confirms that the run has ended.

    Raises:
        BadInputError: there is no such run, it is running, or, unless `ended`, it may be running.
    """
    run, config = known_run(name, folder)
    try:
        server: Server | None = Server.find(address, namespace, folder)
    except UserError:
        server = None
    await require_ended(run, server, ended=ended)
    # The keys and modules that its workers had.
    dotenv.load(folder)
    with imports_from(folder):
        reaped = await reap(ArtifactStore.of(run))
    provisions, problem = await asyncio.to_thread(_clean_up, run, config, folder)
    return Cleaned(run, reaped, provisions, problem)


def _clean_up(run: RunRef, config: RunConfig, folder: Path) -> tuple[str, str]:
    """Returns what was done with the job and the deployment, and the error."""
    if not config.dedicated or find_provisioning(ArtifactStore.of(run)) is None:
        return "", ""
    from everburn.trainers.jobs import RunProvisioning
    from everburn.trainers.protocol import TrainerError

    if config.local:
        if (stack := StackFolder(folder).find()) is not None:
            os.environ.setdefault(EMULATOR_URL_ENV, stack.emulator)
        try:
            check_reachable(api_root(config))
        except UnreachableError:
            return "", ""  # they ended with their emulator
    try:
        return RunProvisioning(run, config).clean_up(), ""
    except TrainerError as error:
        return "", str(error)
