"""The queue of accepted groups.

Groups join in completion order; the first P are the batch of the current optimizer step. Owns which
of them are submitted. Doesn't own when a partial batch is final, or submissions themselves.
"""

from pydantic import BaseModel, ConfigDict, Field

from everburn.records.ids import GroupKey

MAX_GROUPS_PER_SUBMISSION = 256
"""Keeps a submission's list of group names below 2 KB in history."""


class QueuedGroup(BaseModel):
    """An accepted group. Field names are short because hundreds of these are carried through
    continue-as-new."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    c: int
    """cursor"""
    a: int = 0
    """attempt"""
    v: int
    """policy version at admission"""
    n: int
    """surviving completions"""
    d: int
    """datums: segments with a nonzero advantage"""

    @property
    def key(self) -> GroupKey:
        return GroupKey(cursor=self.c, attempt=self.a)


class GroupQueue(BaseModel):
    model_config = ConfigDict(extra="forbid")

    batch_size: int
    """P"""
    groups: list[QueuedGroup] = Field(default_factory=list)
    submitted: int = 0
    """How many groups at the head of the batch have been submitted."""

    @property
    def batch(self) -> list[QueuedGroup]:
        """The groups of the current step so far."""
        return self.groups[: self.batch_size]

    @property
    def full(self) -> bool:
        return len(self.groups) >= self.batch_size

    @property
    def ready(self) -> int:
        """Number of groups of the batch that aren't submitted yet."""
        return len(self.batch) - self.submitted

    def accept(self, group: QueuedGroup) -> None:
        self.groups.append(group)

    def take_submission(self) -> list[QueuedGroup]:
        """Submit all ready groups, up to the limit of one submission."""
        taken = self.batch[self.submitted :][:MAX_GROUPS_PER_SUBMISSION]
        self.submitted += len(taken)
        return taken

    def commit(self) -> list[QueuedGroup]:
        """Remove and return the batch of a finished step."""
        batch = self.batch
        if self.submitted != len(batch):
            raise ValueError(f"{len(batch) - self.submitted} groups of the batch aren't submitted")
        del self.groups[: len(batch)]
        self.submitted = 0
        return batch

    def restart(self) -> None:
        """Start the step again: none of its batch counts as submitted."""
        self.submitted = 0
