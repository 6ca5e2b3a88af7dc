"""Imports the Fireworks SDK without torch.

The SDK imports torch to recognize tensors and for custom losses; Everburn gives it numpy arrays.
That takes seconds of each recovery and 250 MB. So the SDK gets a stand-in that imports torch on
first use.
"""

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

NAMES = ("FiretitanServiceClient", "Datum", "AdamParams", "RequestFailedError")
"""Names that a session uses; the SDK imports them lazily."""

_loading = threading.Lock()


def load() -> None:
    """Import the SDK; concurrent callers wait for the first."""
    with _loading, _lazy_torch():
        sdk = importlib.import_module("fireworks.training.sdk")
        for name in NAMES:
            getattr(sdk, name)


class _LazyTorch(ModuleType):
    """Imports torch on first attribute access."""

    def __getattr__(self, name: str) -> Any:
        _remove(self)
        return getattr(importlib.import_module("torch"), name)


@contextlib.contextmanager
def _lazy_torch() -> Iterator[None]:
    """Modules imported in the block get a stand-in for torch, unless torch is imported already."""
    if "torch" in sys.modules or (spec := importlib.util.find_spec("torch")) is None:
        yield
        return
    stand_in = _LazyTorch("torch")
    stand_in.__spec__ = spec
    sys.modules["torch"] = stand_in
    try:
        yield
    finally:
        _remove(stand_in)


def _remove(stand_in: ModuleType) -> None:
    if sys.modules.get("torch") is stand_in:
        del sys.modules["torch"]
