"""What workflow history carries instead of data: names, references and digests.

Owns the small models that travel in Temporal payloads. Doesn't own the keys under which a run's
data lies (keys.py). Imports nothing heavy: workflows use it.
"""

import base64
import re
import zlib
from typing import Literal

from pydantic import BaseModel, ConfigDict


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
    """A prompt group: the row at `cursor`, in its `attempt`."""

    cursor: int
    attempt: int = 0

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


# What a lease's holder records lies under its epoch, so that a superseded holder, which may come
# back at any moment, has nothing of its successor's to overwrite.


READABLE = 400
"""Characters of a list of groups that history shows as ranges. What is longer is packed."""
PACKED = "~"
"""Begins a list that is: base64 of zlib of ranges in which each cursor is told as the difference to
the one before."""
_CURSOR = re.compile(r"(?<![.\d])\d+")


def encode_groups(groups: list[GroupKey]) -> str:
    """Group names as one short text, sorted: `17-24,26,30.1`, and packed where hundreds of them are
    far apart."""
    ranges = group_ranges(groups)
    return ranges if len(ranges) <= READABLE else _packed(ranges)


def decode_groups(text: str) -> list[GroupKey]:
    """The inverse of `encode_groups`, in order of cursor and attempt."""
    ranges = _unpacked(text) if text.startswith(PACKED) else text
    groups: list[GroupKey] = []
    for part in ranges.split(",") if ranges else []:
        start, dash, stop = part.partition("-")
        if dash:
            groups.extend(GroupKey(cursor=c) for c in range(int(start), int(stop) + 1))
        else:
            groups.append(GroupKey.parse(part))
    return sorted(groups, key=lambda g: (g.cursor, g.attempt))


def group_ranges(groups: list[GroupKey]) -> str:
    """Group names for people, however long: sorted, neighbours as ranges."""
    parts: list[str] = []
    run: list[int] = []
    for group in sorted(groups, key=lambda g: (g.cursor, g.attempt)):
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


def _packed(ranges: str) -> str:
    before = 0

    def difference(found: re.Match[str]) -> str:
        nonlocal before
        last, before = before, int(found[0])
        return str(before - last)

    differences = _CURSOR.sub(difference, ranges)
    return PACKED + base64.b64encode(zlib.compress(differences.encode(), 9)).decode()


def _unpacked(text: str) -> str:
    cursor = 0

    def add(found: re.Match[str]) -> str:
        nonlocal cursor
        cursor += int(found[0])
        return str(cursor)

    differences = zlib.decompress(base64.b64decode(text.removeprefix(PACKED))).decode()
    return _CURSOR.sub(add, differences)


def _range_text(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
