"""The queue of accepted groups, by example: P = 3 groups per step."""

import pytest

from everburn.records.ids import GroupKey, GroupResult
from everburn.scheduling.queue import MAX_GROUPS_PER_SUBMISSION, GroupQueue


def group(cursor: int, attempt: int = 0) -> GroupResult:
    key = GroupKey(cursor=cursor, attempt=attempt)
    return GroupResult(key=key, version=0, outcome="accepted", survivors=4, datums=4)


def queue(*cursors: int, batch_size: int = 3) -> GroupQueue:
    filled = GroupQueue(batch_size=batch_size)
    for cursor in cursors:
        filled.accept(group(cursor))
    return filled


def cursors(groups: list[GroupResult]) -> list[int]:
    return [each.key.cursor for each in groups]


def test_groups_join_the_batch_in_completion_order():
    state = queue(5, 1, 9)
    assert cursors(state.batch) == [5, 1, 9]
    assert state.full


def test_a_submission_takes_all_ready_groups():
    state = queue(5, 1)
    assert state.ready == 2
    assert cursors(state.take_submission()) == [5, 1]
    assert (state.ready, state.full) == (0, False)
    assert state.take_submission() == []
    state.accept(group(9))
    assert cursors(state.take_submission()) == [9]


def test_groups_of_the_next_step_are_not_submitted():
    state = queue(0, 1, 2, 3, 4)
    assert state.ready == 3
    assert cursors(state.take_submission()) == [0, 1, 2]
    assert state.ready == 0
    assert cursors(state.commit()) == [0, 1, 2]
    assert (cursors(state.batch), state.ready, state.full) == ([3, 4], 2, False)


def test_a_restarted_step_submits_its_batch_again():
    state = queue(0, 1, 2)
    state.take_submission()
    state.restart()
    assert cursors(state.take_submission()) == [0, 1, 2]


def test_a_step_cannot_be_committed_before_its_whole_batch_is_submitted():
    state = queue(0, 1)
    state.take_submission()
    state.accept(group(2))
    with pytest.raises(ValueError, match="1 groups of the batch aren't submitted"):
        state.commit()
    assert cursors(state.batch) == [0, 1, 2]


def test_the_last_partial_batch_can_be_committed():
    state = queue(0)
    state.take_submission()
    assert cursors(state.commit()) == [0]
    assert state.groups == []


def test_the_size_of_a_submission_is_bounded():
    count = 2 * MAX_GROUPS_PER_SUBMISSION + 5
    state = queue(*range(count), batch_size=count)
    sizes = [len(state.take_submission()) for _ in range(3)]
    assert sizes == [MAX_GROUPS_PER_SUBMISSION, MAX_GROUPS_PER_SUBMISSION, 5]
    assert state.ready == 0


def test_state_survives_json_in_the_middle_of_a_batch():
    state = queue(0, 1)
    state.take_submission()
    state.accept(group(7, attempt=2))
    again = GroupQueue.model_validate_json(state.model_dump_json())
    assert again == state
    assert again.take_submission() == state.take_submission() == [group(7, attempt=2)]
