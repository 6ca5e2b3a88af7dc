"""Preparing a run's task: everything that can go wrong before money or time is spent.

Owns the checks that need the outside world (imports, rows, keys) and the copy of the
rows that the run keeps. Doesn't own the configuration's own rules (config/fields.py).
"""

from dataclasses import dataclass

from everburn.config import Entrypoint
from everburn.learning.advantages import check_single_reward
from everburn.records.ids import RunRef
from everburn.records.keys import EVALUATION_ROWS_KEY, ROWS_KEY
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore
from everburn.rollouts.dataset import load_rows, stored_rows, write_rows
from everburn.rollouts.function import resolve_names
from everburn.trainers.backends import api_key


@dataclass(frozen=True)
class PreparedTask:
    """rows: training rows per epoch. notes: what a person should hear before it starts."""

    rows: int
    evaluation_rows: int
    notes: list[str]


def prepare_task(run: RunRef) -> PreparedTask:
    """Resolve names, and read and keep the rows. Whether the rollout function can be made is seen
    where that is: a RolloutRunner is due next.

    Raises:
        EntrypointError, DatasetError, MissingKeyError, InvalidAdvantagesError, and whatever the
        user's dataset functions raise.
    """
    config = stored_config(run)
    resolve_names(config)
    if config.completions_per_prompt == 1 and isinstance(config.advantages, Entrypoint):
        check_single_reward(config.advantages)
    api_key(config)
    store = ArtifactStore.of(run)
    # A run that is resumed or forked goes on with the rows it has: the source isn't looked at.
    if not store.exists(ROWS_KEY):
        write_rows(store, ROWS_KEY, load_rows(config.dataset, config.max_rows))
    if not store.exists(EVALUATION_ROWS_KEY):
        held_out = load_rows(config.evaluation_dataset) if config.evaluation_dataset else []
        write_rows(store, EVALUATION_ROWS_KEY, held_out)
    return PreparedTask(
        len(stored_rows(run, ROWS_KEY)),
        len(stored_rows(run, EVALUATION_ROWS_KEY)),
        config.warnings(),
    )
