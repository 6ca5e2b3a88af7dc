"""Where modules of the user are imported from: the current folder, as by `python script.py` there.

Not in an orchestrator: it runs no user code, and its sandbox would find a `workflows` folder of the
user's.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def let_import_from(folder: Path) -> None:
    """For the rest of the process. Everburn's own packages must have been imported by now: then no
    folder can take their place."""
    sys.path.insert(0, str(folder))


@contextmanager
def imports_from(folder: Path) -> Iterator[None]:
    """For a while."""
    let_import_from(folder)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
