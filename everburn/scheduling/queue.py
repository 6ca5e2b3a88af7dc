"""The queue of accepted groups.

Groups join in completion order; the first P are the batch of the current optimizer step. Owns which
of them are submitted. Doesn't own when a partial batch is final, or submissions themselves.
"""

from pydantic import BaseModel, ConfigDict, Field

from everburn.records.ids import GroupResult

MAX_GROUPS_PER_SUBMISSION = 256
"""Bounds one request to the trainer, and its list of groups in history."""


class GroupQueue(BaseModel):
    model_config = ConfigDict(extra="forbid")

    batch_size: int
    """P"""
    groups: list[GroupResult] = Field(default_factory=list)
    submitted: int = 0
    """How many groups at the head of the batch have been submitted."""

    @property
    def batch(self) -> list[GroupResult]:
        """The groups of the current step so far."""
        return self.groups[: self.batch_size]

    @property
    def full(self) -> bool:
        return len(self.groups) >= self.batch_size

    @property
    def ready(self) -> int:
        """Number of groups of the batch that aren't submitted yet."""
        return len(self.batch) - self.submitted

    def accept(self, group: GroupResult) -> None:
        self.groups.append(group)

    def take_submission(self) -> list[GroupResult]:
        """Submit all ready groups, up to the limit of one submission."""
        taken = self.batch[self.submitted :][:MAX_GROUPS_PER_SUBMISSION]
        self.submitted += len(taken)
        return taken

    def commit(self) -> list[GroupResult]:
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
