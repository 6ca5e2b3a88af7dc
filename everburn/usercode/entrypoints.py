"""Entry points: the names by which a run refers to Python code.

Owns the import of `module:attribute` and its errors. Doesn't own what the callables do.
"""

import importlib
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

from everburn.config import Entrypoint


class EntrypointError(ImportError):
    """A name that this worker can't resolve; names the worker and the search path."""


def resolve(entrypoint: Entrypoint) -> Callable[..., Any]:
    """Import the callable that an entry point names.

    Raises:
        EntrypointError: the module doesn't import, has no such attribute, or it isn't callable.
    """
    module_name, _, attribute = entrypoint.name.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # A script that exits when it is imported must not end the worker.
        places = ", ".join(place or "." for place in sys.path[:3])
        raise EntrypointError(
            f"worker {worker_name()} can't import {module_name!r} for {entrypoint.name!r}: "
            f"{type(error).__name__}: {error}. It searches {places}, ...: start the workers where "
            "the module can be imported, or set PYTHONPATH"
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise EntrypointError(
                f"worker {worker_name()}: module {module_name!r} has no {attribute!r} "
                f"(named by {entrypoint.name!r})"
            )
        target = getattr(target, part)
    if not callable(target):
        raise EntrypointError(f"{entrypoint.name!r} is a {type(target).__name__}, not callable")
    return target  # type: ignore[no-any-return]


def call(entrypoint: Entrypoint, *args: Any) -> Any:
    """Resolve an entry point and call it with its keyword arguments."""
    return resolve(entrypoint)(*args, **entrypoint.kwargs)


def worker_name() -> str:
    """This process in error messages."""
    return f"{os.getpid()}@{platform.node()}"
