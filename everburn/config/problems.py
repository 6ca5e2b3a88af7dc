"""The text of a configuration's problems: all at once, each with its path."""

from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from everburn.config.fields import PROVISIONING, RunFields
from everburn.config.sources import Entrypoint


class ConfigError(ValueError):
    """An invalid configuration. The message lists every problem with its path."""


def describe_problems(error: ValidationError, value: object) -> str:
    """All problems that validating `value` found, one a line, each with the field's path."""
    texts: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        path = _path(problem, value)
        texts.setdefault(path, []).append(_describe(problem, path))
    # A union complains once per alternative: that is one problem.
    lines = [f"{path}: {'; or '.join(dict.fromkeys(found))}" for path, found in texts.items()]
    count = f"{len(lines)} problem{'s' * (len(lines) > 1)}"
    return "\n  ".join([f"{count} in the configuration:", *lines])


def _path(problem: ErrorDetails, value: object) -> str:
    """The dotted path as the author of `value` wrote it: without the names that pydantic gives
    to a union's alternatives and to the parts of a bare entry point."""
    first, *others = problem["loc"]
    parts = [first]
    below = value[first] if isinstance(value, dict) and first in value else None
    for part in others:
        is_key = isinstance(below, dict) and part in below
        is_index = isinstance(below, list) and isinstance(part, int)
        if is_key or is_index:
            below = cast(Any, below)[part]
        if is_key or is_index or problem["type"] == "missing":
            parts.append(part)
    return ".".join(str(part) for part in parts)


def _describe(problem: ErrorDetails, path: str) -> str:
    if problem["type"] == "extra_forbidden":
        return f"no such field{_suggest(path)}"
    text = problem["msg"].removeprefix("Value error, ")
    given = problem["input"]
    already_named = isinstance(given, str) and repr(given) in text
    if already_named or not isinstance(given, str | int | float | bool):
        return text
    return f"{text} (got {given!r})"


def _suggest(path: str) -> str:
    from difflib import get_close_matches

    parent, _, name = path.rpartition(".")
    owner = PROVISIONING.get(parent, Entrypoint) if parent else RunFields
    close = get_close_matches(name, owner.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def restated(problem: ErrorDetails) -> InitErrorDetails:
    """A problem in the form from which a new error can be made, its text unchanged."""
    kind = PydanticCustomError(problem["type"], problem["msg"])
    return InitErrorDetails(type=kind, loc=problem["loc"], input=problem["input"])
