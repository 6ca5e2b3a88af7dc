"""Ids of groups and leases: text in history, and ranges of groups for people."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.messages import Reconcile
from everburn.records.ids import (
    GroupKey,
    LeaseKey,
    RunRef,
    group_ranges,
    group_workflow_id,
    in_order,
)

GROUPS = st.builds(
    GroupKey,
    cursor=st.integers(0, 60),
    attempt=st.sampled_from([0, 0, 0, 1, 2]),
    incarnation=st.sampled_from([0, 0, 0, 1, 2]),
)


def keys(*names: str) -> list[GroupKey]:
    return [GroupKey.parse(name) for name in names]


def test_adjacent_groups_become_ranges_and_retried_ones_keep_their_attempt():
    assert group_ranges(keys("30.1", "18", "17", "26", "19", "27.2")) == "17-19,26,27.2,30.1"


def test_a_retried_group_interrupts_a_range():
    assert group_ranges(keys("5", "6.1", "7", "8")) == "5,6.1,7-8"


def test_no_groups_are_an_empty_text():
    assert group_ranges([]) == ""


@given(st.lists(GROUPS))
def test_groups_are_serialized_as_their_texts(groups: list[GroupKey]):
    order = Reconcile(run=RunRef(store="s", id="r"), groups=groups, lease=None, evaluation=None)
    assert order.model_dump(mode="json")["groups"] == [group.text for group in groups]
    assert Reconcile.model_validate_json(order.model_dump_json()) == order


@given(st.lists(GROUPS))
def test_groups_are_ordered_by_row_incarnation_and_attempt(groups: list[GroupKey]):
    places = [(group.cursor, group.incarnation, group.attempt) for group in in_order(groups)]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("key", "text", "name"),
    [
        (GroupKey(cursor=17), "17", "row-000017.0"),
        (GroupKey(cursor=17, attempt=2), "17.2", "row-000017.2"),
        (GroupKey(cursor=17, incarnation=2), "17i2", "row-000017.0i2"),
        (GroupKey(cursor=17, attempt=1, incarnation=2), "17.1i2", "row-000017.1i2"),
        (GroupKey(cursor=12345678), "12345678", "row-12345678.0"),
    ],
)
def test_a_group_has_a_short_text_and_a_sortable_name(key: GroupKey, text: str, name: str):
    assert (key.text, key.name) == (text, name)
    assert GroupKey.parse(text) == GroupKey.named(name) == key


def test_a_group_s_workflow_id_is_unique_over_all_incarnations():
    ids = [group_workflow_id("run", key) for key in keys("17", "17i1", "17.1i1")]
    assert ids == ["run/row-17.0", "run/row-17.0i1", "run/row-17.1i1"]


@pytest.mark.parametrize(
    ("key", "text", "name"),
    [(LeaseKey(0, 3), "3", "lease-000003"), (LeaseKey(2, 3), "3i2", "lease-000003i2")],
)
def test_a_lease_has_a_short_text_and_a_name(key: LeaseKey, text: str, name: str):
    assert (key.text, key.name) == (text, name)
    assert LeaseKey.named(name) == key


def test_a_lease_of_a_newer_incarnation_is_newer_whatever_its_epoch():
    assert LeaseKey(0, 3) < LeaseKey(0, 4) < LeaseKey(1, 4) < LeaseKey(1, 5) < LeaseKey(2, 3)
