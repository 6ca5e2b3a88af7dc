"""The queue of accepted groups, whose head is the open batch.

A pure state machine: groups join in completion order; the first P are the batch of the current
optimizer step, the others wait for the next. It knows which of the batch are already submitted.
It doesn't own when a partial batch is final, nor what a submission does.
"""

from pydantic import BaseModel, ConfigDict, Field

from everburn.records.ids import GroupKey

MAX_GROUPS_PER_SUBMISSION = 256
"""So that a submission's list of group names stays below 2 KB in history."""


class QueuedGroup(BaseModel):
    """An accepted group: whose, how old, and what there is to train. Field names are short
    because hundreds of these are carried through continue-as-new."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    c: int
    """cursor"""
    a: int = 0
    """attempt"""
    v: int
    """the policy version it was admitted at"""
    n: int
    """completions that survived"""
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
    """How many of the batch, from its head, have been submitted."""

    @property
    def batch(self) -> list[QueuedGroup]:
        """The groups of the current step so far."""
        return self.groups[: self.batch_size]

    @property
    def full(self) -> bool:
        return len(self.groups) >= self.batch_size

    @property
    def ready(self) -> int:
        """Groups of the batch that are complete and not yet submitted."""
        return len(self.batch) - self.submitted

    def accept(self, group: QueuedGroup) -> None:
        self.groups.append(group)

    def take_submission(self) -> list[QueuedGroup]:
        """All groups that are ready now, up to the size limit of one request."""
        taken = self.batch[self.submitted :][:MAX_GROUPS_PER_SUBMISSION]
        self.submitted += len(taken)
        return taken

    def commit(self) -> list[QueuedGroup]:
        """The step is done: take its batch out. Returns it."""
        batch = self.batch
        if self.submitted != len(batch):
            raise ValueError(f"{len(batch) - self.submitted} groups of the batch aren't submitted")
        del self.groups[: len(batch)]
        self.submitted = 0
        return batch

    def restart(self) -> None:
        """The step starts anew: nothing of its batch counts as submitted."""
        self.submitted = 0
