"""Source folders of HUD environments in a process that serves several of them.

HUD imports the modules next to an environment or a tasks file by their bare names (`env`,
`graders`). This module prevents a mix-up of equal names in different folders.
"""

import sys
import threading
from pathlib import Path

_lock = threading.Lock()
_folders: set[Path] = set()
_current: Path | None = None


def enter_source(path: Path) -> None:
    """Call before HUD loads from `path`, a file or folder: removes the modules of other folders
    from sys.modules. Code that has imported them keeps them."""
    global _current
    folder = path if path.is_dir() else path.parent
    with _lock:
        if folder == _current:
            return
        _current = folder
        _folders.add(folder)
        others = _folders - {folder}
        for name in [name for name, module in sys.modules.items() if _is_in(module, others)]:
            del sys.modules[name]


def _is_in(module: object, folders: set[Path]) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).parent in folders
