"""Admission: how many completions may be in the works, and whether one more row fits.

A pure state machine: it owns the counts of accepted, reserved and running completions and the
inequality of docs/ARCHITECTURE.md, "Scheduling". It doesn't know which rows those are
(cursor.py), nor what happens to accepted groups (queue.py).
"""

from pydantic import BaseModel, ConfigDict


class Admission(BaseModel):
    """Counts of completions; all are multiples of G except `in_flight`.

    G completions per row, B = P*G per optimizer step, O versions that admission may run ahead,
    C calls of the rollout function at once (None: no limit).
    """

    model_config = ConfigDict(extra="forbid")

    group: int
    batch: int
    ahead: int
    concurrency: int | None = None
    initial_version: int = 0
    version: int = 0
    accepted: int = 0
    reserved: int = 0
    in_flight: int = 0

    @property
    def staleness_capacity(self) -> int:
        """(v + O + 1)*B - (offset + accepted + reserved), with offset = initial_version*B."""
        offset = self.initial_version * self.batch
        allowed = (self.version + self.ahead + 1) * self.batch
        return allowed - (offset + self.accepted + self.reserved)

    @property
    def concurrency_capacity(self) -> int | None:
        """C - in_flight; None without a limit."""
        return None if self.concurrency is None else self.concurrency - self.in_flight

    @property
    def capacity(self) -> int:
        """Completions that may be admitted now; below zero only after a limit was lowered."""
        limit = self.concurrency_capacity
        return self.staleness_capacity if limit is None else min(self.staleness_capacity, limit)

    def can_admit(self) -> bool:
        """Whether a whole row fits: a row is atomic."""
        return self.capacity >= self.group

    def can_retry(self) -> bool:
        """Whether a group can be rebuilt: it kept its reservation and needs only free calls."""
        limit = self.concurrency_capacity
        return limit is None or limit >= self.group

    def admit(self) -> int:
        """Take one row in; returns the version that all its completions are stamped with."""
        if not self.can_admit():
            raise ValueError(f"no capacity for a row: {self!r}")
        self.reserved += self.group
        self.in_flight += self.group
        return self.version

    def retry(self) -> int:
        """Start a group's next attempt under its old reservation; returns its version stamp."""
        if not self.can_retry():
            raise ValueError(f"no free calls for a retry: {self!r}")
        self.in_flight += self.group
        return self.version

    def release(self, calls: int) -> None:
        """`calls` of the rollout function have ended."""
        if not 0 <= calls <= self.in_flight:
            raise ValueError(f"{calls} calls ended of {self.in_flight} in flight")
        self.in_flight -= calls

    def accept(self) -> None:
        """A group will be trained: G reserved become G accepted, however many survived."""
        self._unreserve()
        self.accepted += self.group

    def reject(self) -> None:
        """A group will never be trained: its reservation is given back."""
        self._unreserve()

    def publish(self) -> None:
        """A new policy version serves; a batch of staleness capacity opens."""
        self.version += 1

    def _unreserve(self) -> None:
        if self.reserved < self.group:
            raise ValueError(f"no reservation to resolve: {self!r}")
        self.reserved -= self.group
