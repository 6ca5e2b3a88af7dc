"""Imports that take seconds: made by one thread, for all.

A worker makes them at its start, beside its first tasks. Two threads that import what imports
itself in circles, as transformers does, can each be given half a module; so whoever needs these
modules asks for them here first, and whoever comes second waits.
"""

import importlib
import threading

_turn = threading.Lock()


def import_all(*names: str) -> None:
    """Import modules, or what is behind a name of theirs: `transformers:AutoTokenizer`."""
    with _turn:
        for name in names:
            module, _, attribute = name.partition(":")
            found = importlib.import_module(module)
            if attribute:
                getattr(found, attribute)
