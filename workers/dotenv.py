"""The local `.env` file: environment variables, usually API keys, for a process.

Never overrides the environment. Values are never printed, not even in errors.
"""

import os
import re
from pathlib import Path

from workers.errors import BadInputError

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*)")
_DOUBLE_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?')
_SINGLE_QUOTED = re.compile(r"'([^']*)'\s*(?:#.*)?")
_BARE = re.compile(r"([^'\"\s#](?:(?!\s#).)*)?\s*(?:#.*)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}

_loaded: dict[str, str] = {}
"""The variables that `load` has set in this process."""


def load(folder: Path) -> list[str]:
    """Set the variables of `folder/.env` that the environment lacks; returns their names.

    Raises:
        BadInputError: a line isn't an assignment; the message has its number.
    """
    path = folder / ".env"
    if not path.is_file():
        return []
    values = parse(path.read_text(encoding="utf-8"), str(path))
    fresh = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(fresh)
    _loaded.update(fresh)
    return list(fresh)


def outer_environment() -> dict[str, str]:
    """The environment without the variables that `load` has set, for processes that load the file
    themselves when they start."""
    return {name: value for name, value in os.environ.items() if _loaded.get(name) != value}


def parse(text: str, where: str = ".env") -> dict[str, str]:
    """The assignments of a text: `NAME=value`, optionally after `export`.

    A value is bare (up to ` #`), in single quotes (literal), or in double quotes (with backslash
    escapes). There is no interpolation.

    Raises:
        BadInputError: see `load`.
    """
    values = {}
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        assignment = _ASSIGNMENT.fullmatch(stripped)
        value = None if assignment is None else _value(assignment[2])
        if assignment is None or value is None:
            raise BadInputError(
                f"{where}:{number}: not an assignment: write NAME=value, and quote a value "
                "that contains quotes, outer spaces or ' #'"
            )
        values[assignment[1]] = value
    return values


def _value(text: str) -> str | None:
    if found := _DOUBLE_QUOTED.fullmatch(text):
        return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), found[1])
    found = _SINGLE_QUOTED.fullmatch(text) or _BARE.fullmatch(text)
    return None if found is None else (found[1] or "").rstrip()
