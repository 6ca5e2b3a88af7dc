"""HUD tasks as dataset rows: where they come from, and which train and which are held out.

Owns the three sources (a function, a local file, a hosted task set), the split, and the text of
every complaint about them. A row is a HUD task's own JSON. Doesn't own the environments in
which tasks run (environments.py).
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
    """One part of a task source, the same in every process and at every call.

    Exactly one source: `function` (an entry point, `function(count, seed, **kwargs) -> Taskset`),
    `tasks_file` (.py, folder, .json or .jsonl), or `taskset` (name or id on the HUD platform).
    Shuffled by the seed; the first `training` tasks train, the next `held_out` are held out.

    Raises:
        DatasetError: no such source, unreadable, ambiguous, or too few tasks.
    """
    given = [source for source in (function, tasks_file, taskset) if source is not None]
    if len(given) != 1:
        raise DatasetError("name one source of HUD tasks: function, tasks_file or taskset")
    if tasks_file is not None:
        source = _from_file(tasks_file)
    elif taskset is not None:
        source = _hosted(taskset)
    else:
        source = _made(Entrypoint.model_validate(function), training + held_out, seed)
    first, second = split(source, training, held_out, seed)
    chosen = first if part == "training" else second
    return [task.model_dump(mode="json", exclude_none=True) for task in chosen]


def split(
    source: Taskset, training: int, held_out: int, seed: int
) -> tuple[list[Task], list[Task]]:
    """Disjoint parts of a shuffled source.

    Raises:
        DatasetError: it has too few tasks.
    """
    tasks = list(source)
    needed = training + held_out
    if len(tasks) < needed:
        raise DatasetError(
            f"the task source {source.name!r} has {len(tasks)} tasks, and {needed} are needed: "
            f"{training} to train on and {held_out} held out"
        )
    random.Random(seed).shuffle(tasks)
    return tasks[:training], tasks[training:needed]


def _made(function: Entrypoint, count: int, seed: int) -> Taskset:
    found = call(function, count, seed)
    if not isinstance(found, Taskset):
        raise DatasetError(f"{function.name} returned {type(found).__name__}, not a Taskset")
    return found


def _from_file(path: str) -> Taskset:
    enter_source(Path(path).resolve())
    try:
        found = Taskset.from_file(path)
    except (Exception, SystemExit) as error:
        # A Python file runs when it is read: anything can happen.
        raise DatasetError(
            f"can't read HUD tasks from {path}: {type(error).__name__}: {error}"
        ) from error
    if not len(found):
        raise DatasetError(f"{path} holds no HUD tasks: no Task, list of tasks or Taskset in it")
    return found


def _hosted(name: str) -> Taskset:
    try:
        require_hud_key(f"task set {name!r}")
    except HudKeyMissingError as error:
        raise DatasetError(str(error)) from None
    try:
        return Taskset.from_api(name)
    except Exception as error:
        raise DatasetError(
            f"can't read task set {name!r} of the HUD platform: {type(error).__name__}: {error}"
        ) from error
