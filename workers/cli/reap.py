"""`everburn reap`: what a run that is no more has left: what its completions registered, and its
trainer job and deployment.

Owns the refusal unless it is known that the run has ended. Doesn't own reaping
(everburn/rollouts/sandboxes.py) or what becomes of a job (everburn/trainers/jobs.py).
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
    """What was done for a run. provisions: with its job and deployment, if it had any; problem: why
    they may be left."""

    run: RunRef
    reaped: Reaped
    provisions: str = ""
    problem: str = ""


async def reap_run(
    name: str, address: str | None, namespace: str, folder: Path, *, ended: bool = False
) -> Cleaned:
    """Reap what a run of this folder has left behind, in this process, and give back its job and
    deployment as its configuration says.

    ended: the person knows that it has, where neither its folder nor a server says so.

    Raises:
        BadInputError: there is no such run, or it is running: then its completions still use what
            they registered, and end it themselves; or, unless `ended`, nothing tells whether it is.
    """
    run, config = known_run(name, folder)
    try:
        server: Server | None = Server.find(address, namespace, folder)
    except UserError:
        server = None
    await require_ended(run, server, ended=ended)
    # The keys and the modules that its workers had.
    dotenv.load(folder)
    with imports_from(folder):
        reaped = await reap(ArtifactStore.of(run))
    provisions, problem = await asyncio.to_thread(_give_back, run, config, folder)
    return Cleaned(run, reaped, provisions, problem)


def _give_back(run: RunRef, config: RunConfig, folder: Path) -> tuple[str, str]:
    """What was done with the job and the deployment, and what hindered it."""
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
