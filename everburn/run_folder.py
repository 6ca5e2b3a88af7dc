"""A run's folder: who owns it, where it comes from, and the configuration it was started with.

Doesn't own the files of other nouns (ledger, metrics, rollouts): each has its module.
"""

from functools import lru_cache

from pydantic import BaseModel, ConfigDict, JsonValue

from everburn.config import RunConfig, parse_config
from everburn.refs import CONFIG_KEY, RunRef
from everburn.store import ArtifactStore

OWNER_KEY = "owner.json"
ORIGIN_KEY = "origin.json"


class RunFolderTakenError(ValueError):
    """The folder holds another run: keys are derived from the run's id, so they would collide."""


class Owner(BaseModel):
    """The workflow execution chain that writes to a folder. `life` counts how often the run was
    resumed after its end: each time another chain takes over."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chain: str
    life: int = 0


class Origin(BaseModel):
    """Where a fork comes from: step `step` of `run`, with `changes` of its configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunRef
    step: int
    changes: dict[str, JsonValue]

    def __str__(self) -> str:
        return f"run {self.run.id} at step {self.step}"


def create_run_folder(run: RunRef, config: RunConfig, owner: Owner) -> None:
    """Make the folder, or take it over for a run's next life; again for the same owner changes
    nothing.

    Raises:
        RunFolderTakenError: another execution made it.
    """
    store = ArtifactStore.of(run)
    found = find_owner(store)
    if found is not None and found != owner and found.life >= owner.life:
        raise RunFolderTakenError(
            f"{store.path('')} belongs to another run of the id {run.id!r}: start under a new "
            "workflow id, or go on with `everburn resume`"
        )
    store.put_json(OWNER_KEY, owner.model_dump())
    store.put_json(CONFIG_KEY, config.model_dump(mode="json"))


def find_owner(store: ArtifactStore) -> Owner | None:
    found = store.find_json(OWNER_KEY)
    return None if found is None else Owner.model_validate(found)


def run_owner(store: ArtifactStore) -> Owner:
    """The owner of a folder that a run has. Raises FileNotFoundError."""
    return Owner.model_validate(store.get_json(OWNER_KEY))


def find_origin(store: ArtifactStore) -> Origin | None:
    """Where a run comes from, if it is a fork."""
    found = store.find_json(ORIGIN_KEY)
    return None if found is None else Origin.model_validate(found)


@lru_cache(maxsize=64)
def stored_config(run: RunRef) -> RunConfig:
    """The configuration that a run was started with."""
    return parse_config(ArtifactStore.of(run).get_json(CONFIG_KEY))
