"""A run's folder: who owns it, and the configuration it was started with.

Doesn't own the files of other nouns (ledger, metrics, rollouts): each has its module.
"""

from functools import lru_cache

from everburn.config import RunConfig, parse_config
from everburn.refs import CONFIG_KEY, RunRef
from everburn.store import ArtifactStore

OWNER_KEY = "owner.json"


class RunFolderTakenError(ValueError):
    """The folder holds another run: keys are derived from the run's id, so they would collide."""


def create_run_folder(run: RunRef, config: RunConfig, owner: str) -> None:
    """Make the folder, for one workflow execution chain; again for the same one changes nothing.

    Raises:
        RunFolderTakenError: another execution made it.
    """
    store = ArtifactStore.of(run)
    found = store.find_json(OWNER_KEY)
    if found is not None and found["owner"] != owner:
        raise RunFolderTakenError(
            f"{store.path('')} belongs to another run of the id {run.id!r}: start under a new "
            "workflow id, or move the folder away"
        )
    store.put_json(OWNER_KEY, {"owner": owner})
    store.put_json(CONFIG_KEY, config.model_dump(mode="json"))


@lru_cache(maxsize=64)
def stored_config(run: RunRef) -> RunConfig:
    """The configuration that a run was started with."""
    return parse_config(ArtifactStore.of(run).get_json(CONFIG_KEY))
