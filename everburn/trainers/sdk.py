"""The Fireworks SDK, imported without torch.

The SDK imports torch to recognise its tensors and for loss functions of one's own; Everburn gives
it numpy arrays. Importing torch takes seconds of a trainer worker's start, which is part of every
recovery, and a quarter of a gigabyte. So the SDK gets a module that turns to torch when something
of it is used. Doesn't own anything that is done with the SDK (serverless.py).
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
"""What a session uses; the SDK imports what is behind its names on their first use."""

_loading = threading.Lock()


def load() -> None:
    """Import the SDK; whoever comes second waits for the first."""
    with _loading, _torch_on_first_use():
        sdk = importlib.import_module("fireworks.training.sdk")
        for name in NAMES:
            getattr(sdk, name)


class _Torch(ModuleType):
    """Torch, as soon as something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        _withdraw(self)
        return getattr(importlib.import_module("torch"), name)


@contextlib.contextmanager
def _torch_on_first_use() -> Iterator[None]:
    """What is imported in the block gets a stand-in for torch, unless torch is there already."""
    if "torch" in sys.modules or (spec := importlib.util.find_spec("torch")) is None:
        yield
        return
    stand_in = _Torch("torch")
    stand_in.__spec__ = spec
    sys.modules["torch"] = stand_in
    try:
        yield
    finally:
        _withdraw(stand_in)


def _withdraw(stand_in: ModuleType) -> None:
    if sys.modules.get("torch") is stand_in:
        del sys.modules["torch"]
