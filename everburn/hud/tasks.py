"""HUD tasks as dataset rows: their sources, and the split into training and held-out rows.

A row is a HUD task's own JSON. Doesn't own the environments of tasks (environments.py).
"""

import random
from pathlib import Path
from typing import Any, Literal

from hud.eval import Task, Taskset

from everburn.config import Entrypoint
from everburn.hud.package import HudKeyMissingError, require_hud_key
from everburn.hud.sources import enter_source
from everburn.rollouts.dataset import DatasetError, Row
from everburn.usercode.entrypoints import call


def rows(
    *,
    part: Literal["training", "held_out"],
    training: int,
    held_out: int,
    seed: int = 0,
    function: dict[str, Any] | None = None,
    tasks_file: str | None = None,
    taskset: str | None = None,
) -> list[Row]:
    """One part of a task source. Deterministic.

    Takes exactly one source: `function` (an entry point, `function(count, seed, **kwargs) ->
    Taskset`), `tasks_file` (.py, folder, .json or .jsonl), or `taskset` (name or id on the HUD
    platform). The tasks are shuffled by the seed; the first `training` train, the next `held_out`
    are held out.

    Raises:
        DatasetError: not exactly one source, unreadable, or too few tasks.
    """
    sources = [source for source in (function, tasks_file, taskset) if source is not None]
    if len(sources) != 1:
        raise DatasetError("name one source of HUD tasks: function, tasks_file or taskset")
    if tasks_file is not None:
        source = _from_file(tasks_file)
    elif taskset is not None:
        source = _hosted(taskset)
    else:
        source = _from_function(Entrypoint.model_validate(function), training + held_out, seed)
    first, second = split(source, training, held_out, seed)
    chosen = first if part == "training" else second
    return [task.model_dump(mode="json", exclude_none=True) for task in chosen]


def split(
    source: Taskset, training: int, held_out: int, seed: int
) -> tuple[list[Task], list[Task]]:
    """Disjoint parts of the shuffled source. Raises DatasetError if it has too few tasks."""
    tasks = list(source)
    needed = training + held_out
    if len(tasks) < needed:
        raise DatasetError(
            f"the task source {source.name!r} has {len(tasks)} tasks, but {needed} are needed: "
            f"{training} for training and {held_out} held out"
        )
    random.Random(seed).shuffle(tasks)
    return tasks[:training], tasks[training:needed]


def _from_function(function: Entrypoint, count: int, seed: int) -> Taskset:
    taskset = call(function, count, seed)
    if not isinstance(taskset, Taskset):
        raise DatasetError(f"{function.name} returned {type(taskset).__name__}, not a Taskset")
    return taskset


def _from_file(path: str) -> Taskset:
    enter_source(Path(path).resolve())
    try:
        taskset = Taskset.from_file(path)
    except (Exception, SystemExit) as error:
        # A Python file is executed: it may raise anything.
        raise DatasetError(
            f"can't read HUD tasks from {path}: {type(error).__name__}: {error}"
        ) from error
    if not len(taskset):
        raise DatasetError(f"{path} holds no HUD tasks: no Task, list of tasks or Taskset in it")
    return taskset


def _hosted(name: str) -> Taskset:
    try:
        require_hud_key(f"task set {name!r}")
    except HudKeyMissingError as error:
        raise DatasetError(str(error)) from None
    try:
        return Taskset.from_api(name)
    except Exception as error:
        raise DatasetError(
            f"can't read task set {name!r} from the HUD platform: {type(error).__name__}: {error}"
        ) from error
