"""`everburn resume`: whether a run has ended, so that it can be resumed, and with what.

Doesn't own the state from which it goes on (workflows/restore.py).
"""

from pathlib import Path

from everburn.config import ConfigError, RunConfig, reconfigured
from everburn.records.ids import RunRef
from everburn.records.keys import CONFIG_KEY
from everburn.records.ledger import read_ledger
from everburn.records.run_folder import (
    configured,
)
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
    """A run, its configuration with what may change, and the name of the checkpoint to begin with,
    where `init_from_checkpoint` is assigned.

    Raises:
        BadInputError: there is no such run or checkpoint, or an assignment changes what can't
            change.
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
    """Whether a run is open on the server: it continues by itself while server and workers are up.
    False only where it is known that the run has ended.

    changes: whether it is to be resumed with any. ended: the person knows that it has ended.

    Raises:
        BadInputError: it can't be changed while it runs; another run of its id is open; or nothing
            says that it has ended.
        UserError: the server can't be asked.
    """
    known = await look_up(server, run)
    if known is None or not known.open:
        await require_ended(run, server, ended=ended)
        return False
    at = server.everburn_options
    if not known.own:
        raise BadInputError(
            f"a run of the id {run.id!r} goes on at {server.address}, and {run.folder} knows "
            f"nothing of it so far: look at it with `everburn status {run.id}{at}`"
        )
    if changes:
        raise BadInputError(
            f"run {run.id} hasn't ended, and goes on by itself while server and workers are up: "
            f"`everburn resume {run.id}{at}` without --set stays with it. To change it: `temporal "
            f"workflow update execute --workflow-id {run.id} --name reconfigure {server.options} "
            f"--input ...`; to end it first: `everburn stop {run.id}{at}`"
        )
    return True


def known_run(name: str, folder: Path, step: int | None = None) -> tuple[RunRef, RunConfig]:
    """A run by its id below `runs`, or by its folder or URL, and the configuration it has, or had
    at `step`, with what it was told while it ran; wherever its folder was moved to.

    Raises:
        BadInputError: there is no such run, or what is there is of something else.
        StoreError: it can't be read.
    """
    run = find_run_folder(name, folder)
    try:
        config = configured(run, step)
    except ConfigError as error:
        path = ArtifactStore.of(run).path(CONFIG_KEY)
        raise BadInputError(f"{path} is no run's configuration: {error}") from None
    return run, config.model_copy(update={"store": run.store})


def resumed_state(
    run: RunRef, config: RunConfig, now: float, checkpoint: str | None = None
) -> RunState:
    """The state from which a run goes on.

    Raises:
        BadInputError: the run saved no state that it could go on from, or not that one.
    """
    try:
        return rebuilt_state(run, config, now, checkpoint)
    except RestoreError as error:
        raise BadInputError(str(error)) from None
