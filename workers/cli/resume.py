"""`everburn resume`: checks that a run has ended, and what may change.

Doesn't own the state from which it continues (workflows/restore.py).
"""

from pathlib import Path

from everburn.config import ConfigError, RunConfig, reconfigured
from everburn.records.ids import RunRef
from everburn.records.keys import CONFIG_KEY
from everburn.records.ledger import read_ledger
from everburn.records.run_folder import configured
from everburn.records.store import ArtifactStore
from workers.cli.run_file import RunFile, assign, find_run_folder
from workers.cli.runs import look_up, require_ended
from workers.connection import Server
from workers.errors import BadInputError
from workflows.restore import RestoreError, rebuilt_state, saved_states, states_until
from workflows.run.state import RunState


def ended_run(
    name: str, assignments: list[str], folder: Path
) -> tuple[RunRef, RunFile, str | None]:
    """A run, its changed configuration, and the name of the checkpoint to start from if
    `init_from_checkpoint` is assigned.

    Raises:
        BadInputError: there is no such run or checkpoint, or a changed field can't change.
    """
    run, config = known_run(name, folder)
    changes: dict[str, object] = {}
    for assignment in assignments:
        assign(changes, assignment)
    checkpoint = changes.pop("init_from_checkpoint", None)
    try:
        config = reconfigured(config, changes) if changes else config
    except ConfigError as error:
        raise BadInputError(str(error)) from None
    wanted = None if checkpoint is None else str(checkpoint)
    if wanted is not None:
        store = ArtifactStore.of(run)
        try:
            states_until(saved_states(store, read_ledger(store)), wanted, run)
        except RestoreError as error:
            raise BadInputError(str(error)) from None
    return run, RunFile(run.id, config.model_dump(mode="json"), config), wanted


async def is_running(server: Server, run: RunRef, *, changes: bool, ended: bool) -> bool:
    """True if the run is open on the server; False only if it is certain that it has ended.

    changes: it is to be resumed with changes. ended: the user confirms that it has ended.

    Raises:
        BadInputError: it is open and can't be changed; another run with its id is open; or it may
            be running.
        UserError: the server doesn't answer.
    """
    known = await look_up(server, run)
    if known is None or not known.open:
        await require_ended(run, server, ended=ended)
        return False
    at = server.everburn_options
    if not known.own:
        raise BadInputError(
            f"another run with the id {run.id!r} is running at {server.address}, not that of "
            f"{run.folder}: inspect it with `everburn status {run.id}{at}`"
        )
    if changes:
        raise BadInputError(
            f"run {run.id} hasn't ended and continues while server and workers are up: "
            f"`everburn resume {run.id}{at}` without --set follows it. To change it: `temporal "
            f"workflow update execute --workflow-id {run.id} --name reconfigure {server.options} "
            f"--input ...`; to end it first: `everburn stop {run.id}{at}`"
        )
    return True


def known_run(name: str, folder: Path, step: int | None = None) -> tuple[RunRef, RunConfig]:
    """A run by its id in `runs`, folder or URL, and its configuration (at `step` if given)
    with the changes made while it ran.

    Raises:
        BadInputError: there is no such run, or the folder isn't a run's.
        StoreError: the folder can't be read.
    """
    run = find_run_folder(name, folder)
    try:
        config = configured(run, step)
    except ConfigError as error:
        path = ArtifactStore.of(run).path(CONFIG_KEY)
        raise BadInputError(f"{path} isn't a run's configuration: {error}") from None
    return run, config.model_copy(update={"store": run.store})


def resumed_state(
    run: RunRef, config: RunConfig, now: float, checkpoint: str | None = None
) -> RunState:
    """The state from which a run continues.

    Raises:
        BadInputError: the run saved no state, or not that checkpoint.
    """
    try:
        return rebuilt_state(run, config, now, checkpoint)
    except RestoreError as error:
        raise BadInputError(str(error)) from None
