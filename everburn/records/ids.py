"""What workflow history carries instead of data: names, references and digests.

Owns the small models that travel in Temporal payloads. Doesn't own the keys under which a run's
data lies (keys.py). Imports nothing heavy: workflows use it.
"""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_serializer, model_validator


class Ref(BaseModel):
    """An immutable value that travels in history."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunRef(Ref):
    """A run and where its folder lies: `store` is a folder or URL, `id` the workflow id."""

    store: str
    id: str

    @property
    def folder(self) -> str:
        return f"{self.store.rstrip('/')}/{self.id}"


class StoredRef(Ref):
    """A file of the run's folder, by key, with the digest of its bytes."""

    key: str
    sha256: str


NUMBERS_PER_LIFE = 1000
"""Attempts and lease epochs of a resumed run begin at the next thousand: what its former lives
used, and perhaps left no trace of, is never used again."""


class GroupKey(Ref):
    """A prompt group: the row at `cursor`, in its `attempt`. JSON has it as its `text`."""

    cursor: int
    attempt: int = 0

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return dict(cls.parse(value)) if isinstance(value, str) else value

    @model_serializer
    def _to_text(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        return f"row-{self.cursor:06d}.{self.attempt}"

    @property
    def life(self) -> int:
        """The life of the run in which the group was begun; after a thousand attempts at one row
        more than that, never less."""
        return self.attempt // NUMBERS_PER_LIFE

    @property
    def text(self) -> str:
        """The shortest unambiguous form: `17` or, retried, `17.1`."""
        return f"{self.cursor}.{self.attempt}" if self.attempt else str(self.cursor)

    @classmethod
    def parse(cls, text: str) -> "GroupKey":
        cursor, _, attempt = text.partition(".")
        return cls(cursor=int(cursor), attempt=int(attempt or 0))

    @classmethod
    def named(cls, name: str) -> "GroupKey":
        """The inverse of `name`."""
        return cls.parse(name.removeprefix("row-"))


def group_workflow_id(run: str, key: GroupKey) -> str:
    """The id of a group's workflow: unique over the run's whole life."""
    return f"{run}/row-{key.cursor}.{key.attempt}"


class RewardSum(Ref):
    """Completions in numbers: how many, and the sum of their rewards."""

    samples: int = 0
    total: float = 0.0

    def plus(self, samples: int, total: float) -> "RewardSum":
        return RewardSum(samples=self.samples + samples, total=self.total + total)


RolloutStatus = Literal["succeeded", "dropped", "failed"]
"""`dropped`: the rollout function returned None. `failed`: recoverable failures used up."""


class RolloutOutcome(Ref):
    """The terminal record of one completion; where it succeeded, its rollout is in the store."""

    completion: int
    status: RolloutStatus
    error: str | None = None
    reused: bool = False
    """Whether work that an earlier attempt had finished was used: the rollout, or some calls."""


GroupOutcome = Literal["accepted", "filtered", "incomplete", "skipped", "fatal", "cancelled"]
"""incomplete: fewer completions survived than min_group_size. skipped: by a person, after a fatal
error. fatal, cancelled: such a group has no manifest, and its row is issued again."""


class GroupResult(Ref):
    """A prompt group that has ended, in numbers; its manifest is in the store."""

    key: GroupKey
    version: int
    """The policy version at its admission."""
    outcome: GroupOutcome
    survivors: int = 0
    datums: int = 0
    """Segments with a nonzero advantage: what a trainer is sent."""
    reward_sum: float = 0.0
    """Over the survivors."""


def in_order(groups: Iterable[GroupKey]) -> list[GroupKey]:
    return sorted(groups, key=lambda group: (group.cursor, group.attempt))


def group_ranges(groups: Iterable[GroupKey]) -> str:
    """Group names for people: `17-24,26,30.1`."""
    parts: list[str] = []
    run: list[int] = []
    for group in in_order(groups):
        if run and (group.attempt or group.cursor != run[-1] + 1):
            parts.append(_range_text(run))
            run = []
        if group.attempt:
            parts.append(group.text)
        else:
            run.append(group.cursor)
    if run:
        parts.append(_range_text(run))
    return ",".join(parts)


def _range_text(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
