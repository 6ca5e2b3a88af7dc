"""Resolving the names by which a run refers to Python code.

Owns the import of `module:attribute` and the errors of it. Doesn't own what the callables do.
"""

import importlib
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

from everburn.config import Entrypoint


class EntrypointError(ImportError):
    """A name that this worker can't resolve; says which worker and where it looked."""


def resolve(entrypoint: Entrypoint) -> Callable[..., Any]:
    """Import the callable that an entry point names.

    Raises:
        EntrypointError: the module doesn't import, has no such attribute, or it isn't callable.
    """
    module_name, _, attribute = entrypoint.name.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # Anything can happen while user code is imported; all of it means the same here. A script
        # that exits when imported must not take the worker with it.
        places = ", ".join(place or "." for place in sys.path[:3])
        raise EntrypointError(
            f"worker {worker_name()} can't import {module_name!r} for {entrypoint.name!r}: "
            f"{type(error).__name__}: {error}. It looks in {places}, ...: start the workers where "
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
    """Resolve and call with the entry point's own keyword arguments."""
    return resolve(entrypoint)(*args, **entrypoint.kwargs)


def worker_name() -> str:
    """This process, as error messages name it."""
    return f"{os.getpid()}@{platform.node()}"
