"""Detects user code that changed after a stack's workers imported it.

Owns the comparison of the files with the processes, and the note. Doesn't own the import
(everburn/usercode/entrypoints.py) or the restart of workers (workers/stack/supervisor.py).
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from everburn.config import Entrypoint, RunConfig
from workers.cli.runs import list_runs
from workers.stack.folder import ProcessRecord, StackState

if TYPE_CHECKING:
    from temporalio.client import Client

RUN_USER_CODE = ("rollout", "trainer")


async def stale_code(
    config: RunConfig, stack: StackState, folder: Path, client: "Client"
) -> str | None:
    """A note if workers may have imported older code than the run's, else None.

    Compares the modules that the configuration names, not their imports. A worker imports a module
    for the first run that names it, so its code is old if it served a run before the file changed.
    """
    workers = [stack.services[name] for name in RUN_USER_CODE if name in stack.services]
    files = {file: file.stat().st_mtime for file in _files(config, folder)}
    if not any(changed > worker.created for changed in files.values() for worker in workers):
        return None
    runs = await list_runs(client)

    def holds_older(worker: ProcessRecord, changed: float) -> bool:
        return worker.created < changed and any(
            run.started.timestamp() < changed
            and (run.ended is None or run.ended.timestamp() > worker.created)
            for run in runs
        )

    stale = [one for one in workers if any(holds_older(one, time) for time in files.values())]
    if not stale:
        return None
    older = [f for f, time in files.items() if any(holds_older(one, time) for one in stale)]
    names = " and ".join(sorted(_shown(file, folder) for file in older))
    pids = " ".join(str(one.pid) for one in stale)
    return (
        f"{names} changed after a run had started on these workers, which keep the imported "
        f"code: `kill {pids}` restarts them with the present code"
    )


def _files(config: RunConfig, folder: Path) -> set[Path]:
    """The files of the modules that entry points name."""
    fields = (getattr(config, name) for name in RunConfig.model_fields)
    modules = {field.name.partition(":")[0] for field in fields if isinstance(field, Entrypoint)}
    found = (_file(module, folder) for module in modules)
    return {file for file in found if file is not None and file.is_file()}


def _file(module: str, folder: Path) -> Path | None:
    """Where workers of the folder find a module. importlib.util.find_spec would import packages."""
    places: list[str] | None = [str(folder), *sys.path]
    parts = module.split(".")
    spec = None
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _shown(file: Path, folder: Path) -> str:
    return str(file.relative_to(folder) if file.is_relative_to(folder) else file)
