"""`everburn reap`: what a run's completions registered and nobody has reaped.

Owns the refusal while the run goes on. Doesn't own reaping (everburn/resources.py).
"""

from pathlib import Path

from everburn.refs import RunRef
from everburn.resources import Reaped, reap
from everburn.store import ArtifactStore
from workers import dotenv
from workers.errors import BadInputError, UserError
from workers.resume import known_run
from workers.server import Server
from workers.user_modules import imports_from


async def reap_run(
    name: str, address: str | None, namespace: str, folder: Path
) -> tuple[RunRef, Reaped]:
    """Reap what a run of this folder has left behind, in this process.

    Raises:
        BadInputError: there is no such run, or it is running: then its completions still use what
            they registered, and end it themselves.
    """
    run, _ = known_run(name, folder)
    try:
        server = Server.find(address, namespace, folder)
    except UserError:
        server = None  # nothing runs here
    if server is not None and await _is_open(server, run):
        raise BadInputError(
            f"run {run.id} is running: its completions end what they made. Stop it first, with "
            f"`everburn stop {run.id}`"
        )
    # The keys and the modules that its workers had.
    dotenv.load(folder)
    with imports_from(folder):
        return run, await reap(ArtifactStore.of(run))


async def _is_open(server: Server, run: RunRef) -> bool:
    from activities.reconciliation import is_open

    return await is_open(await server.connect(), run.id)
