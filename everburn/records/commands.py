"""Commands: what a person asked of a run while it ran, and how the run ended.

Owns the records, one file each, written once and numbered within each incarnation of the run. A
ledger entry repeats the commands since the step before it; those after the last step are only here.
Doesn't own what a command does (workflows/run/train_run.py).
"""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, JsonValue

from everburn.records.ids import Ref
from everburn.records.keys import COMMANDS, command_key
from everburn.records.store import ArtifactStore

Ending = Literal["completed", "stopped", "failed", "cancelled"]


class Command(Ref):
    """A command to the run, a state that it saved at its end, or how it ended.

    at: seconds since 1970, by the workflow's clock. step: the last committed one. changes: of the
    configuration. checkpoint: the full path of what was saved. ending: of the incarnation.
    """

    at: float
    text: str
    incarnation: int = 0
    number: int = 0
    step: int = 0
    changes: dict[str, JsonValue] = Field(default_factory=dict)
    checkpoint: str | None = None
    ending: Ending | None = None


def record_command(store: ArtifactStore, command: Command) -> None:
    """Write the command, unless its number is taken: the first record stays."""
    key = command_key(command.incarnation, command.number)
    store.put_json(key, command.model_dump(mode="json"), once=True)


def read_commands(store: ArtifactStore) -> list[Command]:
    """All commands, in order; `pandas.DataFrame(c.model_dump() for c in ...)` makes a table."""
    return [Command.model_validate(store.get_json(key)) for key in store.keys(COMMANDS)]


def commands_between(
    store: ArtifactStore, incarnation: int, start: int, stop: int
) -> list[Command]:
    """Commands start..stop-1 of an incarnation. Raises FileNotFoundError."""
    keys = (command_key(incarnation, number) for number in range(start, stop))
    return [Command.model_validate(store.get_json(key)) for key in keys]


def changes_by(commands: Iterable[Command]) -> dict[str, JsonValue]:
    """Their changes of the configuration together; the last one of a field counts."""
    merged: dict[str, JsonValue] = {}
    for command in commands:
        merged |= command.changes
    return merged


def ending_of(store: ArtifactStore) -> Ending | None:
    """How the run ended; None while it runs, and after an end that left no record."""
    incarnation = None
    for key in reversed(store.keys(COMMANDS)):
        command = Command.model_validate(store.get_json(key))
        if incarnation not in (None, command.incarnation):
            break
        if command.ending is not None:
            return command.ending
        # Commands may follow the ending; in a later incarnation there is no ending yet.
        incarnation = command.incarnation
    return None
