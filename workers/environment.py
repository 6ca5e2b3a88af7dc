"""The Python environment of a command or worker: our packages, its programs, the user's modules.

`workflows`, `activities` and `workers` are names that other projects use too: llama-index-workflows
installs a `workflows`. Imports nothing of Everburn, so that it works when another is in the way.
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


def intruders() -> dict[str, str]:
    """What is in the place of our packages, by name, with what to do; empty if all is well."""
    found = {}
    for name in OUR_PACKAGES:
        place = _place_of(name)
        if place == OUR_FOLDER / name:
            continue
        others = [other for other in packages_distributions().get(name, []) if other != "everburn"]
        by = f", installed by {', '.join(others)}," if others else ""
        found[name] = (
            f"{place or 'nothing'}{by} is in the place of {OUR_FOLDER / name}: use an environment "
            "of its own for Everburn, and no folder of this name on PYTHONPATH"
        )
    return found


def _place_of(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]).resolve() if places else None


def find_script(name: str) -> Path | None:
    """The program of this environment, else of the PATH."""
    ours = sysconfig.get_path("scripts")
    found = shutil.which(name, path=ours) or shutil.which(name)
    return None if found is None else Path(found)


def as_typed(name: str) -> str:
    """How a person calls it: by name where the shell finds it, else by its path."""
    if shutil.which(name) is not None:
        return name
    return str(find_script(name) or name)


def let_import_from(folder: Path) -> None:
    """Have modules of the user imported from a folder, as by `python script.py` there, for the rest
    of the process. Everburn's own packages must have been imported by now: then no
    folder can take their place. Not in an orchestrator: it runs no user code, and its sandbox would
    find a `workflows` folder of the user's."""
    sys.path.insert(0, str(folder))


@contextmanager
def imports_from(folder: Path) -> Iterator[None]:
    """For a while."""
    let_import_from(folder)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
