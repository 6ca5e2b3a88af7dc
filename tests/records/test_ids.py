"""Group names in history: one name, or one short text for hundreds of groups."""

import random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everburn.records import ids
from everburn.records.ids import PACKED, GroupKey, decode_groups, encode_groups, group_ranges
from everburn.scheduling.queue import MAX_GROUPS_PER_SUBMISSION
from workflows.run.producer import MAX_GROUPS_OUT

GROUPS = st.builds(GroupKey, cursor=st.integers(0, 60), attempt=st.sampled_from([0, 0, 0, 1, 2]))


def keys(*names: str) -> list[GroupKey]:
    return [GroupKey.parse(name) for name in names]


def test_adjacent_groups_become_ranges_and_retried_groups_keep_their_attempt():
    groups = keys("30.1", "18", "17", "26", "19", "27.2")
    assert encode_groups(groups) == "17-19,26,27.2,30.1"
    assert decode_groups("17-19,26,27.2,30.1") == keys("17", "18", "19", "26", "27.2", "30.1")


def test_a_retried_group_interrupts_a_range():
    assert encode_groups(keys("5", "6.1", "7", "8")) == "5,6.1,7-8"


def test_no_groups_encode_as_empty_text():
    assert (encode_groups([]), decode_groups("")) == ("", [])


@given(st.sets(GROUPS))
def test_groups_round_trip(groups: set[GroupKey]):
    text = encode_groups(list(groups))
    assert decode_groups(text) == sorted(groups, key=lambda group: (group.cursor, group.attempt))
    assert encode_groups(decode_groups(text)) == text


@given(st.sets(GROUPS, min_size=1))
def test_packed_groups_round_trip(groups: set[GroupKey]):
    with mock.patch.object(ids, "READABLE", 0):
        text = encode_groups(list(groups))
    assert text.startswith(PACKED)
    assert decode_groups(text) == sorted(groups, key=lambda group: (group.cursor, group.attempt))


def test_the_largest_scattered_batch_encodes_into_410_characters():
    """About every third row rejected, and some retried: ranges would take 3 KB."""
    draw, batch, cursor = random.Random(1), [], 10**6
    while len(batch) < MAX_GROUPS_OUT:
        cursor += draw.choice([1, 2])
        batch.append(GroupKey(cursor=cursor, attempt=int(draw.random() < 0.03)))
    assert len(encode_groups(batch)) < 410 < 3000 < len(group_ranges(batch))
    assert decode_groups(encode_groups(batch)) == batch


def test_the_largest_scattered_submission_fits_into_two_kilobytes():
    scattered = [GroupKey(cursor=10**6 - 1 - 2 * i) for i in range(MAX_GROUPS_PER_SUBMISSION)]
    assert len(encode_groups(scattered)) < 2048


@pytest.mark.parametrize(
    ("key", "text", "name"),
    [
        (GroupKey(cursor=17), "17", "row-000017.0"),
        (GroupKey(cursor=17, attempt=2), "17.2", "row-000017.2"),
        (GroupKey(cursor=12345678), "12345678", "row-12345678.0"),
    ],
)
def test_a_group_has_a_short_text_and_a_sortable_name(key: GroupKey, text: str, name: str):
    assert (key.text, key.name) == (text, name)
    assert GroupKey.parse(text) == key
