"""HUD tasks as dataset rows: where they come from, and which train and which are held out.

Owns the three sources (bundled arithmetic, a local file, a hosted task set), the split, and the
text of every complaint about them. A row is a HUD task's own JSON. Doesn't own the environments in
which tasks run (environments.py).
"""

import random
from pathlib import Path
from typing import Any, Literal

from hud.eval import Task, Taskset
from pydantic import BaseModel, ConfigDict, Field

from everburn.hud.arithmetic import environment
from everburn.hud.package import HudKeyMissingError, require_hud_key
from everburn.hud.sources import enter_source
from everburn.rollouts.dataset import DatasetError, Row

Range = tuple[int, int]


class Arithmetic(BaseModel):
    """Bundled problems: `count` different pairs of operands from two inclusive ranges."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: Literal["multiply", "add"]
    count: int = Field(ge=1)
    a: Range
    b: Range


def rows(
    *,
    part: Literal["training", "held_out"],
    training: int,
    held_out: int,
    seed: int = 0,
    arithmetic: dict[str, Any] | None = None,
    tasks_file: str | None = None,
    taskset: str | None = None,
) -> list[Row]:
    """One part of a task source, the same in every process and at every call.

    Exactly one source: `arithmetic` (fields of Arithmetic but `count`), `tasks_file` (.py, folder,
    .json or .jsonl), or `taskset` (name or id on the HUD platform). Shuffled by the seed; the
    first `training` tasks train, the next `held_out` are held out.

    Raises:
        DatasetError: no such source, unreadable, ambiguous, or too few tasks.
    """
    given = [source for source in (arithmetic, tasks_file, taskset) if source is not None]
    if len(given) != 1:
        raise DatasetError("name one source of HUD tasks: arithmetic, tasks_file or taskset")
    if tasks_file is not None:
        source = _from_file(tasks_file)
    elif taskset is not None:
        source = _hosted(taskset)
    else:
        problems = Arithmetic.model_validate({"count": training + held_out, **(arithmetic or {})})
        source = bundled(problems, seed)
    first, second = split(source, training, held_out, seed)
    chosen = first if part == "training" else second
    return [task.model_dump(mode="json", exclude_none=True) for task in chosen]


def bundled(problems: Arithmetic, seed: int) -> Taskset:
    """Different pairs, drawn without replacement.

    Raises:
        DatasetError: the ranges hold fewer.
    """
    template = environment().templates[problems.template]
    a_count, b_count = (high - low + 1 for low, high in (problems.a, problems.b))
    pairs = a_count * b_count
    if problems.count > pairs:
        raise DatasetError(
            f"{problems.count} arithmetic tasks were asked for, and the operand ranges hold only "
            f"{pairs} unique pairs: widen them, or ask for fewer tasks"
        )
    chosen = random.Random(seed).sample(range(pairs), problems.count)
    return Taskset(
        f"arithmetic-{seed}",
        [
            template(a=problems.a[0] + index // b_count, b=problems.b[0] + index % b_count)
            for index in chosen
        ],
    )


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
