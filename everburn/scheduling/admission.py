"""Admission: whether one more row may start.

Owns the counts of completions and the inequality of docs/ARCHITECTURE.md, "Scheduling". Doesn't own
rows (cursor.py) or accepted groups (queue.py).
"""

from pydantic import BaseModel, ConfigDict


class Admission(BaseModel):
    """group: G, completions per row. batch: B = P*G, completions per optimizer step.
    max_head_offpolicy_versions: O. concurrency: C, concurrent rollouts (None: unlimited). accepted,
    reserved: multiples of G."""

    model_config = ConfigDict(extra="forbid")

    group: int
    batch: int
    max_head_offpolicy_versions: int
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
        allowed = (self.version + self.max_head_offpolicy_versions + 1) * self.batch
        return allowed - (offset + self.accepted + self.reserved)

    @property
    def concurrency_capacity(self) -> int | None:
        """C - in_flight; None if unlimited."""
        return None if self.concurrency is None else self.concurrency - self.in_flight

    @property
    def capacity(self) -> int:
        """Completions that may be admitted now; negative only after a limit was lowered."""
        limit = self.concurrency_capacity
        return self.staleness_capacity if limit is None else min(self.staleness_capacity, limit)

    def can_admit(self) -> bool:
        """Whether a whole row fits; rows are atomic."""
        return self.capacity >= self.group

    def can_retry(self) -> bool:
        """Whether a group may be retried: it kept its reservation and needs only free calls."""
        limit = self.concurrency_capacity
        return limit is None or limit >= self.group

    def admit(self) -> int:
        """Admit one row; returns the version stamp of all its completions."""
        if not self.can_admit():
            raise ValueError(f"no capacity for a row: {self!r}")
        self.reserved += self.group
        self.in_flight += self.group
        return self.version

    def retry(self) -> int:
        """Start a group's next attempt under its reservation; returns its version stamp."""
        if not self.can_retry():
            raise ValueError(f"no free calls for a retry: {self!r}")
        self.in_flight += self.group
        return self.version

    def release(self, calls: int) -> None:
        if not 0 <= calls <= self.in_flight:
            raise ValueError(f"{calls} calls ended of {self.in_flight} in flight")
        self.in_flight -= calls

    def accept(self) -> None:
        """Turn G reserved into G accepted completions, however many survived."""
        self._unreserve()
        self.accepted += self.group

    def reject(self) -> None:
        """Free the reservation of a group that will never be trained."""
        self._unreserve()

    def publish(self) -> None:
        """Count a published version, which adds B to the staleness capacity."""
        self.version += 1

    def _unreserve(self) -> None:
        if self.reserved < self.group:
            raise ValueError(f"no reservation to resolve: {self!r}")
        self.reserved -= self.group
