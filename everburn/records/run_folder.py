"""A run's folder: its owner, its server, its origin, its initial and current configuration.

Doesn't own the other files (ledger, metrics, rollouts), which have their own modules.
"""

from pydantic import BaseModel, ConfigDict, JsonValue

from everburn.config import RunConfig, changed_fields, parse_config
from everburn.records.commands import Command, changes_by, read_commands, record_command
from everburn.records.ids import RunRef
from everburn.records.keys import CONFIG_KEY
from everburn.records.store import ArtifactStore

OWNER_KEY = "owner.json"
SERVER_KEY = "server.json"
ORIGIN_KEY = "origin.json"


class RunFolderTakenError(ValueError):
    """The folder holds another run: keys are derived from the run's id, so they would collide."""


class Owner(BaseModel):
    """The incarnation that writes to a folder: an execution chain of the run's workflow, identified
    by its first execution. incarnation: how often the run was resumed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_execution_id: str
    incarnation: int = 0


class ServerAddress(BaseModel):
    """The Temporal server of the current incarnation, as its orchestrator worker reaches it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str
    namespace: str


class Origin(BaseModel):
    """The origin of a fork: step `step` of `run`, with `changes` of its configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunRef
    step: int
    changes: dict[str, JsonValue]

    def __str__(self) -> str:
        return f"run {self.run.id} at step {self.step}"


def create_run_folder(
    run: RunRef, config: RunConfig, owner: Owner, at: float = 0.0, step: int = 0
) -> None:
    """Create the folder, or take it over for a run's next incarnation. Idempotent per owner.

    The first incarnation's configuration stays; the changes of a later one are recorded as its
    first command. at, step: when the incarnation starts, and after which step.

    Raises:
        RunFolderTakenError: the folder belongs to another execution.
    """
    store = ArtifactStore.of(run)
    found = find_owner(store)
    if found is not None and found != owner and found.incarnation >= owner.incarnation:
        raise RunFolderTakenError(
            f"{store.path('')} belongs to another run of the id {run.id!r}: start under a new "
            "workflow id, or continue with `everburn resume`"
        )
    store.put_json(OWNER_KEY, owner.model_dump())
    if not owner.incarnation:
        store.put_json(CONFIG_KEY, config.model_dump(mode="json"))
        return
    # The folder may have been moved: that is no change.
    changes = changed_fields(configured(run).model_copy(update={"store": config.store}), config)
    record_command(
        store,
        Command(at=at, text="resumed", incarnation=owner.incarnation, step=step, changes=changes),
    )


def find_owner(store: ArtifactStore) -> Owner | None:
    found = store.find_json(OWNER_KEY)
    return None if found is None else Owner.model_validate(found)


def run_owner(store: ArtifactStore) -> Owner:
    """The owner of a run's folder. Raises FileNotFoundError."""
    return Owner.model_validate(store.get_json(OWNER_KEY))


def record_server(store: ArtifactStore, server: ServerAddress) -> None:
    store.put_json(SERVER_KEY, server.model_dump())


def find_server(store: ArtifactStore) -> ServerAddress | None:
    """The server of the run's current incarnation; None if the folder has no record."""
    found = store.find_json(SERVER_KEY)
    return None if found is None else ServerAddress.model_validate(found)


def find_origin(store: ArtifactStore) -> Origin | None:
    """The origin of a fork; None for other runs."""
    found = store.find_json(ORIGIN_KEY)
    return None if found is None else Origin.model_validate(found)


def stored_config(run: RunRef) -> RunConfig:
    """The configuration that a run was started with.

    Not cached: another run may start under the id of one whose folder was deleted.
    """
    return parse_config(ArtifactStore.of(run).get_json(CONFIG_KEY))


def configured(run: RunRef, step: int | None = None) -> RunConfig:
    """A run's current configuration, or the one that it had when it committed `step`."""
    changes = commanded_changes(run, step)
    config = stored_config(run)
    return parse_config(config.model_dump(mode="json") | changes) if changes else config


def commanded_changes(run: RunRef, step: int | None = None) -> dict[str, JsonValue]:
    """The configuration changes that commands made since the run's start."""
    commands = read_commands(ArtifactStore.of(run))
    return changes_by(command for command in commands if step is None or command.step < step)
