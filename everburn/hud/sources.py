"""Source folders of HUD environments, in a process that serves several.

HUD imports what stands beside an environment or a tasks file by its bare name (`env`, `graders`),
as for a process that has one. Owns that such a module is never taken for another folder's of the
same name. Doesn't own the loading (hud's).
"""

import sys
import threading
from pathlib import Path

_lock = threading.Lock()
_folders: set[Path] = set()
_current: Path | None = None


def enter_source(path: Path) -> None:
    """To be called before HUD loads from `path` (a file, or a folder of them): modules that other
    folders have left are forgotten. Whoever uses them keeps them."""
    global _current
    folder = path if path.is_dir() else path.parent
    with _lock:
        if folder == _current:
            return
        _current = folder
        _folders.add(folder)
        others = _folders - {folder}
        for name in [name for name, module in sys.modules.items() if _is_of(module, others)]:
            del sys.modules[name]


def _is_of(module: object, folders: set[Path]) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).parent in folders
