"""The cursor: which rows were issued, and which of them are resolved for good.

A pure state machine over positions 0..total-1 of the shuffled, epoch-repeated order. A row is
resolved when it was rejected or when the step that trained it was committed. The set of resolved
rows is exact (a low-water mark and ranges above it), so that a resumed run neither issues a
resolved row again nor skips an unresolved one. It doesn't know what a row holds
(rollouts/dataset.py).
"""

from bisect import bisect_left
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field


class Cursor(BaseModel):
    """Positions below `next` were issued once; those in `returned` wait to be issued again."""

    model_config = ConfigDict(extra="forbid")

    total: int
    next: int = 0
    low: int = 0
    """All rows below are resolved."""
    above: list[tuple[int, int]] = Field(default_factory=list)
    """Resolved ranges [start, stop) above `low`: sorted, disjoint, not touching."""
    returned: list[int] = Field(default_factory=list)
    """Issued, unresolved and no longer in anybody's hands; sorted."""

    @property
    def exhausted(self) -> bool:
        """Whether there is no row left to issue."""
        return not self.returned and self.next >= self.total

    @property
    def resolved_count(self) -> int:
        return self.low + sum(stop - start for start, stop in self.above)

    def take(self) -> int | None:
        """Issue the next row, lowest first; None when there is none."""
        if self.returned:
            return self.returned.pop(0)
        if self.next >= self.total:
            return None
        self.next += 1
        return self.next - 1

    def give_back(self, row: int) -> None:
        """An issued row was dropped before its fate was known: it will be issued again."""
        place = bisect_left(self.returned, row)
        known = place < len(self.returned) and self.returned[place] == row
        if known or not 0 <= row < self.next or self.is_resolved(row):
            raise ValueError(f"row {row} isn't out: {self!r}")
        self.returned.insert(place, row)

    def withdraw(self, row: int) -> None:
        """A row that waits to be issued again won't be: its fate can be settled now."""
        self.returned.remove(row)

    def resolve(self, row: int) -> None:
        """The row's fate is final. Resolving a row twice is an error: each row has one fate."""
        if not 0 <= row < self.next or self.is_resolved(row) or row in self.returned:
            raise ValueError(f"row {row} can't be resolved: {self!r}")
        place = bisect_left(self.above, (row, row))
        start, stop = row, row + 1
        if place < len(self.above) and self.above[place][0] == stop:
            stop = self.above.pop(place)[1]
        if place > 0 and self.above[place - 1][1] == start:
            place -= 1
            start = self.above.pop(place)[0]
        if start == self.low:
            self.low = stop
        else:
            self.above.insert(place, (start, stop))

    def is_resolved(self, row: int) -> bool:
        return row < self.low or any(start <= row < stop for start, stop in self.above)

    def unresolved(self) -> Iterator[int]:
        """Issued rows without a fate, in order; those in `returned` included."""
        return (row for row in range(self.low, self.next) if not self.is_resolved(row))
