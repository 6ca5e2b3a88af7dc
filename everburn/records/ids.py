"""What workflow history carries instead of data: names, references and digests.

Owns the small models that travel in Temporal payloads. Doesn't own the keys under which a run's
data lies (keys.py). Imports nothing heavy: workflows use it.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

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


def incarnation_suffix(incarnation: int) -> str:
    """How names tell a run's incarnations apart: nothing for the first, then `i1`, `i2`, ..."""
    return f"i{incarnation}" if incarnation else ""


class GroupKey(Ref):
    """A prompt group: the row at `cursor`, in an attempt of one incarnation of the run. Attempts
    are counted from 0 in each incarnation. JSON has it as its `text`."""

    cursor: int
    attempt: int = 0
    incarnation: int = 0

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return dict(cls.parse(value)) if isinstance(value, str) else value

    @model_serializer
    def _to_text(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        """In file names: `row-000030.0`, `row-000030.1i2`."""
        return f"row-{self.cursor:06d}.{self.attempt}{incarnation_suffix(self.incarnation)}"

    @property
    def text(self) -> str:
        """The shortest unambiguous form: `30`, `30.1`, `30i2` or `30.1i2`."""
        attempt = f".{self.attempt}" if self.attempt else ""
        return f"{self.cursor}{attempt}{incarnation_suffix(self.incarnation)}"

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Sorts by row, and the groups of a row from the oldest to the newest."""
        return (self.cursor, self.incarnation, self.attempt)

    @classmethod
    def parse(cls, text: str) -> "GroupKey":
        row, _, incarnation = text.partition("i")
        cursor, _, attempt = row.partition(".")
        return cls(cursor=int(cursor), attempt=int(attempt or 0), incarnation=int(incarnation or 0))

    @classmethod
    def named(cls, name: str) -> "GroupKey":
        """The inverse of `name`."""
        return cls.parse(name.removeprefix("row-"))


def group_workflow_id(run: str, key: GroupKey) -> str:
    """The id of a group's workflow: unique over all incarnations of the run."""
    return f"{run}/row-{key.cursor}.{key.attempt}{incarnation_suffix(key.incarnation)}"


class LeaseKey(NamedTuple):
    """A lease of a run. The larger key is the newer lease, and fences the others: lease epochs grow
    with every lease, but a lease that an incarnation asked for last may be unknown to the next."""

    incarnation: int
    lease_epoch: int

    @property
    def name(self) -> str:
        """In file names: `lease-000003`, `lease-000003i1`."""
        return f"lease-{self.lease_epoch:06d}{incarnation_suffix(self.incarnation)}"

    @property
    def text(self) -> str:
        """For people and in workflow ids: `3`, `3i1`."""
        return f"{self.lease_epoch}{incarnation_suffix(self.incarnation)}"

    @classmethod
    def named(cls, name: str) -> "LeaseKey":
        """The inverse of `name`."""
        lease_epoch, _, incarnation = name.removeprefix("lease-").partition("i")
        return cls(int(incarnation or 0), int(lease_epoch))


class Leased(Ref):
    """What belongs to a lease. `lease_epoch` is the lease's fencing number."""

    incarnation: int
    lease_epoch: int

    @property
    def lease_key(self) -> LeaseKey:
        return LeaseKey(self.incarnation, self.lease_epoch)


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
    return sorted(groups, key=lambda group: group.sort_key)


def group_ranges(groups: Iterable[GroupKey]) -> str:
    """Group names for people, with ranges of first attempts: `17-24,26,30.1`, and `31-38i2` of a
    resumed run."""
    ranges: list[tuple[GroupKey, GroupKey]] = []
    for group in in_order(groups):
        if ranges and group == _neighbor(ranges[-1][1]):
            ranges[-1] = (ranges[-1][0], group)
        else:
            ranges.append((group, group))
    return ",".join(_range_text(first, last) for first, last in ranges)


def _neighbor(group: GroupKey) -> GroupKey | None:
    """The group that continues a range after this one."""
    return None if group.attempt else group.model_copy(update={"cursor": group.cursor + 1})


def _range_text(first: GroupKey, last: GroupKey) -> str:
    return first.text if first == last else f"{first.cursor}-{last.text}"
