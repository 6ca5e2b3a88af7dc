"""Programs that are installed with this environment: where they are, and how to type them."""

import shutil
import sysconfig
from pathlib import Path


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
