"""The configuration file of `everburn run`, and run ids and folders.

Owns the file's syntax, `--set`, the base of relative paths, the default run id, the link `latest`,
and how a run's folder is found in a local or an object store. Doesn't own the configuration's rules
(everburn/config/fields.py).
"""

import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from everburn.config import ConfigError, Entrypoint, RunConfig, parse_config
from everburn.records.ids import RunRef
from everburn.records.keys import CONFIG_KEY
from everburn.records.store import ArtifactStore
from workers.errors import BadInputError

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""It is the name of a folder and a workflow, and is typed by users."""
ENTRYPOINT_FIELDS = frozenset(
    name
    for name, field in RunConfig.model_fields.items()
    if field.annotation in (Entrypoint, Entrypoint | None)
)
"""Fields in which plain text is a callable's name; in others it may be a path or a loss."""
DATASET_FIELDS = ("dataset", "evaluation_dataset")


@dataclass(frozen=True)
class RunFile:
    """A valid configuration, independent of the current folder."""

    name: str
    values: dict[str, Any]
    config: RunConfig


def load_run_file(path: Path, assignments: list[str], folder: Path) -> RunFile:
    """Read a file, apply `path=value` assignments, and check the result.

    Dataset paths in the file are relative to the file's folder, those in assignments and `store` to
    `folder`.

    Raises:
        BadInputError: with all problems.
    """
    values = _read(path)
    locate_datasets(values, path.absolute().parent)
    for assignment in assignments:
        assign(values, assignment)
    locate_datasets(values, folder)
    try:
        config = parse_config(values)
    except ConfigError as error:
        raise BadInputError(f"{path}: {error}") from None
    if (problem := config.origin_problem()) is not None:
        raise BadInputError(f"{path}: {problem}")
    values["store"] = _absolute(config.store, folder)
    return RunFile(_name(path), values, parse_config(values))


def new_run_id(name: str, store: str, now: datetime) -> str:
    """`<name>-<yyyymmdd-hhmmss>`, followed by a number if the local store has that id."""
    first = f"{name}-{now:%Y%m%d-%H%M%S}"
    number, run_id = 1, first
    while is_local(store) and (Path(store) / run_id).exists():
        number += 1
        run_id = f"{first}-{number}"
    return run_id


def check_run_id(run_id: str) -> str:
    """Raises BadInputError: the id can't name a folder."""
    if not RUN_ID.fullmatch(run_id):
        raise BadInputError(
            f"{run_id!r} isn't a valid run id: use at most 128 letters, digits, '.', '_' and '-', "
            "starting with a letter or digit"
        )
    return run_id


def link_latest(store: str, run_id: str) -> None:
    """Point the link `latest`, next to the run's folder, to it. Object stores have no links."""
    if not is_local(store):
        return
    folder = Path(store)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".latest-{run_id}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(run_id)
    draft.replace(folder / "latest")


def find_run_folder(name: str, folder: Path) -> RunRef:
    """A run by its id in `folder/runs`, or by its own folder or URL.

    Raises:
        BadInputError: there is none, or this environment doesn't support the URL.
        StoreError: the store doesn't answer.
    """
    if is_local(name):
        path = Path(name)
        found = (path if path.is_dir() else folder / "runs" / name).resolve()
        run = RunRef(store=str(found.parent), id=found.name)
    else:
        store, _, run_id = name.rstrip("/").rpartition("/")
        run = RunRef(store=store, id=run_id)
    try:
        there = ArtifactStore.of(run).exists(CONFIG_KEY)
    except (ValueError, ImportError) as error:
        # An unknown scheme, or one whose library isn't installed.
        raise BadInputError(f"{name}: {error}") from None
    if not there:
        raise BadInputError(
            f"there is no run in {run.folder}: give its id in {folder / 'runs'}, its folder or its "
            "URL"
        )
    return run


def is_local(location: str) -> bool:
    return "://" not in location


def missing_datasets(config: RunConfig) -> list[str]:
    """Local dataset files that don't exist."""
    sources = (config.dataset, config.evaluation_dataset)
    files = [source for source in sources if isinstance(source, str) and is_local(source)]
    return [file for file in files if not Path(file).is_file()]


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInputError(f"{path} isn't UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise BadInputError(
            f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}"
        ) from None
    if not isinstance(values, dict):
        raise BadInputError(f"{path} contains a JSON {type(values).__name__}, not an object")
    return values


def assign(values: dict[str, Any], assignment: str) -> None:
    """Apply `path=value`; the value is JSON if it parses as JSON, else text."""
    path, equals, text = assignment.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise BadInputError(f"--set {assignment}: write path=value, for example epochs=2")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    target = values
    if isinstance(values.get(parts[0]), str) and parts[0] in ENTRYPOINT_FIELDS and parts[1:]:
        # A plain name stands for an object, whose keyword arguments can be set.
        values[parts[0]] = {"name": values[parts[0]]}
    for depth, part in enumerate(parts[:-1], start=1):
        below = target.setdefault(part, {})
        if not isinstance(below, dict):
            raise BadInputError(f"--set {assignment}: {'.'.join(parts[:depth])} isn't an object")
        target = below
    target[parts[-1]] = value


def locate_datasets(values: dict[str, Any], folder: Path) -> None:
    """Resolve relative dataset paths from `folder`."""
    for field in DATASET_FIELDS:
        if isinstance(values.get(field), str):
            values[field] = _absolute(values[field], folder)


def _absolute(location: str, folder: Path) -> str:
    return str(folder / location) if is_local(location) else location


def _name(path: Path) -> str:
    """The file's name without .json; for `run.json`, the folder's name."""
    stem = path.absolute().name.removesuffix(".json")
    first, dot, others = stem.partition(".")
    name = f"{path.absolute().parent.name}{dot}{others}" if first == "run" else stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "run"
