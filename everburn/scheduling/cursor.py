"""The cursor: which rows were issued, and which of them are resolved.

Rows are positions 0..total-1 of the shuffled, epoch-repeated order (rollouts/dataset.py). A row is
resolved when it was rejected or its step was committed. The set of resolved rows is exact, so that
a resumed run neither issues a resolved row again nor skips an unresolved one.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field


class Cursor(BaseModel):
    """Positions below `next` were issued; those in `returned` will be issued again."""

    model_config = ConfigDict(extra="forbid")

    total: int
    next: int = 0
    low: int = 0
    """All rows below it are resolved."""
    above: list[tuple[int, int]] = Field(default_factory=list)
    """Resolved ranges [start, stop) above `low`: sorted, disjoint, not touching."""
    returned: list[int] = Field(default_factory=list)
    """Issued and unresolved rows without a running group, sorted."""

    @property
    def exhausted(self) -> bool:
        return not self.returned and self.next >= self.total

    @property
    def resolved_count(self) -> int:
        return self.low + sum(stop - start for start, stop in self.above)

    def take(self) -> int | None:
        """Issue the lowest returned row, else the next new one; None if none is left."""
        if self.returned:
            return self.returned.pop(0)
        if self.next >= self.total:
            return None
        self.next += 1
        return self.next - 1

    def give_back(self, row: int) -> None:
        """Return an issued row without an outcome; it will be issued again."""
        self._require_out(row)
        insort(self.returned, row)

    def withdraw(self, row: int) -> None:
        """Take a returned row out again, so that it can be resolved."""
        self.returned.remove(row)

    def resolve(self, row: int) -> None:
        """Record that the row's outcome is final; each row has exactly one."""
        self._require_out(row)
        index = bisect_left(self.above, (row, row))
        start, stop = row, row + 1
        if index < len(self.above) and self.above[index][0] == stop:
            stop = self.above.pop(index)[1]
        if index > 0 and self.above[index - 1][1] == start:
            index -= 1
            start = self.above.pop(index)[0]
        if start == self.low:
            self.low = stop
        else:
            self.above.insert(index, (start, stop))

    def is_resolved(self, row: int) -> bool:
        return row < self.low or any(start <= row < stop for start, stop in self.above)

    def unresolved(self) -> Iterator[int]:
        """Issued rows without an outcome, in order; includes `returned`."""
        return (row for row in range(self.low, self.next) if not self.is_resolved(row))

    def _require_out(self, row: int) -> None:
        if not 0 <= row < self.next or self.is_resolved(row) or row in self.returned:
            raise ValueError(f"row {row} isn't out: {self!r}")
