"""The cursor, by example and against a set of integers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everburn.scheduling.cursor import Cursor


def take_all(cursor: Cursor) -> list[int]:
    rows = []
    while (row := cursor.take()) is not None:
        rows.append(row)
    return rows


def test_rows_are_issued_once_and_in_order():
    cursor = Cursor(total=3)
    assert take_all(cursor) == [0, 1, 2]
    assert cursor.exhausted
    assert cursor.take() is None


def test_out_of_order_outcomes_are_remembered_exactly():
    cursor = Cursor(total=10)
    take_all(cursor)
    for row in (4, 2, 0):
        cursor.resolve(row)
    assert (cursor.low, cursor.above) == (1, [(2, 3), (4, 5)])
    assert list(cursor.unresolved()) == [1, 3, 5, 6, 7, 8, 9]
    assert cursor.resolved_count == 3


def test_ranges_merge_when_gaps_close():
    cursor = Cursor(total=6)
    take_all(cursor)
    for row in (1, 3, 5, 4):
        cursor.resolve(row)
    assert (cursor.low, cursor.above) == (0, [(1, 2), (3, 6)])
    cursor.resolve(2)
    assert (cursor.low, cursor.above) == (0, [(1, 6)])
    cursor.resolve(0)
    assert (cursor.low, cursor.above) == (6, [])


def test_a_returned_row_is_issued_again_before_new_rows():
    cursor = Cursor(total=5)
    assert [cursor.take() for _ in range(3)] == [0, 1, 2]
    cursor.give_back(2)
    cursor.give_back(0)
    assert [cursor.take() for _ in range(3)] == [0, 2, 3]


def test_the_cursor_is_not_exhausted_while_it_has_returned_rows():
    cursor = Cursor(total=1)
    cursor.take()
    cursor.give_back(0)
    assert not cursor.exhausted
    assert list(cursor.unresolved()) == [0]
    cursor.take()
    assert cursor.exhausted


def test_a_resumed_run_neither_repeats_nor_skips_a_row():
    before = Cursor(total=6)
    for _ in range(4):
        before.take()
    before.resolve(2)
    before.resolve(0)
    after = Cursor.model_validate_json(before.model_dump_json())
    for row in list(after.unresolved()):
        after.give_back(row)
    assert take_all(after) == [1, 3, 4, 5]


@pytest.mark.parametrize(
    ("row", "why"),
    [(-1, "not a row"), (4, "not issued"), (0, "resolved"), (2, "resolved"), (3, "given back")],
)
def test_only_a_row_that_is_out_can_be_resolved_or_given_back(row: int, why: str):
    cursor = Cursor(total=5, next=4, low=1, above=[(2, 3)], returned=[3])
    unchanged = cursor.model_copy(deep=True)
    with pytest.raises(ValueError, match=f"row {row} isn't out"):
        cursor.resolve(row)
    with pytest.raises(ValueError, match=f"row {row} isn't out"):
        cursor.give_back(row)
    assert cursor == unchanged


@given(st.permutations(range(60)))
def test_any_order_of_resolution_merges_into_one_mark(order: list[int]):
    cursor = Cursor(total=60)
    take_all(cursor)
    for row in order:
        cursor.resolve(row)
    assert (cursor.low, cursor.above, cursor.resolved_count) == (60, [], 60)


class CursorAgainstSets(RuleBasedStateMachine):
    """The cursor against three plain sets: rows that are out, returned, resolved."""

    @initialize(total=st.integers(1, 40))
    def start(self, total: int) -> None:
        self.cursor = Cursor(total=total)
        self.fresh = list(range(total))
        self.out: set[int] = set()
        self.returned: set[int] = set()
        self.resolved: set[int] = set()

    @rule()
    def take(self) -> None:
        if self.returned:
            expected = min(self.returned)
            self.returned.discard(expected)
        else:
            expected = self.fresh.pop(0) if self.fresh else None
        assert self.cursor.take() == expected
        if expected is not None:
            self.out.add(expected)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.out)))
        self.cursor.give_back(row)
        self.out.discard(row)
        self.returned.add(row)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def resolve(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.out)))
        self.cursor.resolve(row)
        self.out.discard(row)
        self.resolved.add(row)

    @rule(row=st.integers(-2, 42))
    def refuse_a_row_that_is_not_out(self, row: int) -> None:
        if row not in self.out:
            with pytest.raises(ValueError, match=f"row {row} "):
                self.cursor.resolve(row)
            with pytest.raises(ValueError, match=f"row {row} "):
                self.cursor.give_back(row)

    @rule()
    def continue_as_new(self) -> None:
        restored = Cursor.model_validate_json(self.cursor.model_dump_json())
        assert restored == self.cursor
        self.cursor = restored

    @invariant()
    def matches_the_sets(self) -> None:
        cursor = self.cursor
        rows = range(cursor.total)
        assert {row for row in rows if cursor.is_resolved(row)} == self.resolved
        assert cursor.resolved_count == len(self.resolved)
        assert list(cursor.unresolved()) == sorted(self.out | self.returned)
        assert cursor.exhausted == (not self.fresh and not self.returned)

    @invariant()
    def ranges_are_minimal(self) -> None:
        edges = [self.cursor.low, *(edge for span in self.cursor.above for edge in span)]
        assert all(left < right for left, right in pairwise(edges)), (
            "ranges are sorted, not empty, and don't touch each other or the mark"
        )


TestCursorAgainstSets = CursorAgainstSets.TestCase
