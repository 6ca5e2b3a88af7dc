"""The file of `everburn run`: from what a person wrote to what is sent.

Owns the file's syntax, `--set`, where relative paths start, the default run id, and where a run's
folder is found, in a local or an object store, the link `latest` included. The configuration's own
rules: everburn/config/fields.py.
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
"""It names a folder and a workflow, and is typed by people."""
ENTRYPOINT_FIELDS = frozenset(
    name
    for name, field in RunConfig.model_fields.items()
    if field.annotation in (Entrypoint, Entrypoint | None)
)
"""Those whose bare text is a callable's name; elsewhere it may be a path, or a loss by its name."""
DATASET_FIELDS = ("dataset", "evaluation_dataset")


@dataclass(frozen=True)
class RunFile:
    """A configuration that is valid and doesn't depend on the current folder any more."""

    name: str
    values: dict[str, Any]
    config: RunConfig


def load_run_file(path: Path, assignments: list[str], folder: Path) -> RunFile:
    """Read, change by `path=value` assignments, and check.

    Relative dataset paths start at the file's own folder, those in assignments and `store` at
    `folder`.

    Raises:
        BadInputError: with everything that is wrong.
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
    """`<name>-<yyyymmdd-hhmmss>`, with a number behind it where the local store has that."""
    first = f"{name}-{now:%Y%m%d-%H%M%S}"
    number, run_id = 1, first
    while is_local(store) and (Path(store) / run_id).exists():
        number += 1
        run_id = f"{first}-{number}"
    return run_id


def check_run_id(run_id: str) -> str:
    """Raises BadInputError for an id that can't name a folder."""
    if not RUN_ID.fullmatch(run_id):
        raise BadInputError(
            f"{run_id!r} can't be a run id: letters, digits, '.', '_' and '-', at most 128, "
            "beginning with a letter or digit"
        )
    return run_id


def link_latest(store: str, run_id: str) -> None:
    """Let `latest`, beside the run's folder, point to it. Object stores have no links."""
    if not is_local(store):
        return
    folder = Path(store)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".latest-{run_id}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(run_id)
    draft.replace(folder / "latest")


def find_run_folder(name: str, folder: Path) -> RunRef:
    """A run by its id below `runs` of `folder`, or by its own folder or URL.

    Raises:
        BadInputError: there is none, or this environment can't look there.
        StoreError: that can't be told now.
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
        # A scheme that nobody knows, or whose library isn't installed.
        raise BadInputError(f"{name}: {error}") from None
    if not there:
        raise BadInputError(
            f"there is no run in {run.folder}: name one by its id below {folder / 'runs'}, or by "
            "its folder or URL"
        )
    return run


def is_local(location: str) -> bool:
    return "://" not in location


def missing_datasets(config: RunConfig) -> list[str]:
    """Local dataset files that aren't there."""
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
        raise BadInputError(f"{path} holds a JSON {type(values).__name__}, not an object")
    return values


def assign(values: dict[str, Any], assignment: str) -> None:
    """Apply `path=value`; the value is JSON where it reads as JSON, else text."""
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
        # A bare name stands for an object: its keyword arguments can be set all the same.
        values[parts[0]] = {"name": values[parts[0]]}
    for depth, part in enumerate(parts[:-1], start=1):
        below = target.setdefault(part, {})
        if not isinstance(below, dict):
            raise BadInputError(f"--set {assignment}: {'.'.join(parts[:depth])} isn't an object")
        target = below
    target[parts[-1]] = value


def locate_datasets(values: dict[str, Any], folder: Path) -> None:
    """Let relative dataset paths start at `folder`."""
    for field in DATASET_FIELDS:
        if isinstance(values.get(field), str):
            values[field] = _absolute(values[field], folder)


def _absolute(location: str, folder: Path) -> str:
    return str(folder / location) if is_local(location) else location


def _name(path: Path) -> str:
    """The file's name without .json; a file that is called `run` goes by its folder's name."""
    stem = path.absolute().name.removesuffix(".json")
    first, dot, others = stem.partition(".")
    name = f"{path.absolute().parent.name}{dot}{others}" if first == "run" else stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "run"
