"""Preparation of a run's task: the checks that can fail before money or time is spent.

Owns the checks that need the outside world (imports, rows, keys) and the run's copy of the rows.
Doesn't own the configuration's own rules (config/).
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
    """rows: training rows per epoch. notes: warnings for a person."""

    rows: int
    evaluation_rows: int
    notes: list[str]


def prepare_task(run: RunRef) -> PreparedTask:
    """Resolve names, and copy the rows into the run's folder. Doesn't call the rollout factory: a
    RolloutRunner does.

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
    # A resumed or forked run continues with the rows it has: their source isn't read again.
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
