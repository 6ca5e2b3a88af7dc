"""The Python environment of a process: Everburn's packages, programs, the user's modules.

Other projects use the names `workflows`, `activities` and `workers` too: llama-index-workflows
installs a `workflows`. Imports no other module of Everburn, so that it works if one is shadowed.
Doesn't own the variables of a folder's `.env` (dotenv.py).
"""

import importlib.util
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from pathlib import Path

BUILD_ID_ENV = "EVERBURN_BUILD_ID"
"""Empty: unversioned workers."""

OUR_PACKAGES = ("everburn", "workflows", "activities", "workers")
OUR_FOLDER = Path(__file__).resolve().parents[1]


def shadowed_packages() -> dict[str, str]:
    """Everburn's packages that another package or folder shadows, each with what to do."""
    found = {}
    for name in OUR_PACKAGES:
        place = _place_of(name)
        if place == OUR_FOLDER / name:
            continue
        others = [other for other in packages_distributions().get(name, []) if other != "everburn"]
        by = f", installed by {', '.join(others)}," if others else ""
        found[name] = (
            f"{place or 'nothing'}{by} is imported instead of {OUR_FOLDER / name}: use a separate "
            "environment for Everburn, and no folder of this name on PYTHONPATH"
        )
    return found


def _place_of(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]).resolve() if places else None


def find_script(name: str) -> Path | None:
    """A program of this environment, else of the PATH."""
    ours = sysconfig.get_path("scripts")
    found = shutil.which(name, path=ours) or shutil.which(name)
    return None if found is None else Path(found)


def as_typed(name: str) -> str:
    """A program as a user can call it: by name if it is on the PATH, else by its path."""
    if shutil.which(name) is not None:
        return name
    return str(find_script(name) or name)


def let_import_from(folder: Path) -> None:
    """Let this process import the user's modules from `folder`, as `python script.py` would.

    Everburn's packages must be imported already, so that no folder can shadow them. Not for an
    orchestrator: it runs no user code, and its sandbox would import a user's `workflows` folder."""
    sys.path.insert(0, str(folder))


@contextmanager
def imports_from(folder: Path) -> Iterator[None]:
    """`let_import_from` for the duration of the block."""
    let_import_from(folder)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
