"""Controls: what a run was told while it ran, and how it ended.

Owns the records, one file each, written once and numbered within each life of the run. Those that a
committed step has followed are also part of its ledger entry; what came after the last step is only
here. Doesn't own what a control does (workflows/run/train_run.py).
"""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, JsonValue

from everburn.records.ids import Ref
from everburn.records.keys import CONTROLS, control_key
from everburn.records.store import ArtifactStore

Ending = Literal["completed", "stopped", "failed", "cancelled"]


class Control(Ref):
    """What a person told the run, or what became of it.

    at: seconds since the epoch, by the workflow's clock. life: how often the run had been resumed.
    step: the last committed one at that time. changes: of the configuration. checkpoint: the full
    path of what was saved. ending: of how the run's life ended.
    """

    at: float
    what: str
    life: int = 0
    number: int = 0
    step: int = 0
    changes: dict[str, JsonValue] = Field(default_factory=dict)
    checkpoint: str | None = None
    ending: Ending | None = None


def record_control(store: ArtifactStore, control: Control) -> None:
    """Keep it; what is there under its number stays."""
    key = control_key(control.life, control.number)
    store.put_json(key, control.model_dump(mode="json"), once=True)


def read_controls(store: ArtifactStore) -> list[Control]:
    """All controls, in order; `pandas.DataFrame(c.model_dump() for c in ...)` makes a table."""
    return [Control.model_validate(store.get_json(key)) for key in store.keys(CONTROLS)]


def controls_of(store: ArtifactStore, life: int, start: int, stop: int) -> list[Control]:
    """Those numbered start..stop-1 of a life. Raises FileNotFoundError."""
    keys = (control_key(life, number) for number in range(start, stop))
    return [Control.model_validate(store.get_json(key)) for key in keys]


def changes_by(controls: Iterable[Control]) -> dict[str, JsonValue]:
    """What the controls changed of the configuration, together: the last one counts."""
    merged: dict[str, JsonValue] = {}
    for control in controls:
        merged |= control.changes
    return merged


def ending_of(store: ArtifactStore) -> Ending | None:
    """How the run ended; None while it runs, and where it had no time to say so."""
    life = None
    for key in reversed(store.keys(CONTROLS)):
        control = Control.model_validate(store.get_json(key))
        if life not in (None, control.life):
            break
        if control.ending is not None:
            return control.ending
        # What came after it, or else what a life that goes on was told.
        life = control.life
    return None
