"""Admission, by example. G = 4 completions per row, P = 2 rows per step, so B = 8."""

import pytest

from everburn.scheduling.admission import Admission


def admission(ahead: int = 0, concurrency: int | None = None, **state: int) -> Admission:
    return Admission(group=4, batch=8, ahead=ahead, concurrency=concurrency, **state)


def admit_all(state: Admission) -> list[int]:
    """Admit rows while they fit; returns their version stamps."""
    stamps = []
    while state.can_admit():
        stamps.append(state.admit())
    return stamps


def test_on_policy_admits_exactly_one_batch():
    state = admission(ahead=0)
    assert admit_all(state) == [0, 0]
    assert (state.capacity, state.reserved, state.in_flight) == (0, 8, 8)


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_a_new_run_may_start_o_plus_one_batches(ahead: int):
    assert len(admit_all(admission(ahead))) == 2 * (ahead + 1)


def test_a_publication_opens_one_batch_and_stamps_its_rows():
    state = admission(ahead=0)
    admit_all(state)
    for _ in range(2):
        state.release(4)
        state.accept()
    assert not state.can_admit()
    state.publish()
    assert admit_all(state) == [1, 1]


def test_acceptance_counts_a_whole_group_however_many_survived():
    state = admission()
    state.admit()
    state.release(4)
    before = state.staleness_capacity
    state.accept()
    assert (state.accepted, state.reserved, state.staleness_capacity) == (4, 0, before)


def test_rejection_gives_capacity_back_at_once():
    state = admission()
    admit_all(state)
    state.release(4)
    state.reject()
    assert (state.accepted, state.reserved, state.capacity) == (0, 4, 4)
    assert state.can_admit()


def test_a_row_is_atomic():
    state = admission(ahead=3, concurrency=7)
    state.admit()
    assert state.capacity == 3
    assert not state.can_admit()
    state.release(1)
    assert state.capacity == 4
    assert state.can_admit()


def test_the_smaller_of_both_limits_counts():
    assert admission(ahead=0, concurrency=100).capacity == 8
    assert admission(ahead=9, concurrency=6).capacity == 6
    assert admission(ahead=9).concurrency_capacity is None
    assert admission(ahead=9).capacity == 80


def test_finished_calls_free_concurrency_but_not_staleness():
    state = admission(ahead=0, concurrency=8)
    admit_all(state)
    state.release(8)
    assert (state.concurrency_capacity, state.staleness_capacity) == (8, 0)
    assert not state.can_admit()


def test_a_retry_keeps_the_reservation_and_needs_only_free_calls():
    state = admission(ahead=0, concurrency=8)
    admit_all(state)
    assert not state.can_retry()
    state.release(4)
    state.publish()
    assert state.can_retry()
    assert state.retry() == 1
    assert (state.reserved, state.in_flight) == (8, 8)
    with pytest.raises(ValueError, match="no free calls for a retry"):
        state.retry()


def test_the_offset_of_an_initial_version_cancels_out():
    assert admission(ahead=1, initial_version=7, version=7).capacity == admission(ahead=1).capacity


@pytest.mark.parametrize("waiting_groups", [0, 1, 3])
def test_a_resumed_run_continues_with_what_it_has(waiting_groups: int):
    """Accepted is v*B plus what is completed and untrained; capacity (O+1)*B minus that."""
    version, waiting = 5, 4 * waiting_groups
    state = admission(ahead=2, version=version, accepted=version * 8 + waiting)
    assert state.capacity == 3 * 8 - waiting


def test_a_lowered_limit_admits_nothing_until_work_has_drained():
    state = admission(ahead=2, concurrency=24)
    admit_all(state)
    state.ahead, state.concurrency = 0, 8
    assert state.capacity == -16
    assert not state.can_admit()
    state.release(24)
    for _ in range(6):
        state.accept()
    assert not state.can_admit()
    for version in (1, 2):
        state.publish()
        assert (state.version, state.can_admit()) == (version, False)
    state.publish()
    assert admit_all(state) == [3, 3]


def test_impossible_transitions_are_errors():
    state = admission()
    with pytest.raises(ValueError, match="no reservation"):
        state.accept()
    with pytest.raises(ValueError, match="no reservation"):
        state.reject()
    with pytest.raises(ValueError, match="1 calls ended of 0 in flight"):
        state.release(1)
    admit_all(state)
    with pytest.raises(ValueError, match="-1 calls ended"):
        state.release(-1)
    with pytest.raises(ValueError, match="no capacity for a row"):
        state.admit()
    assert state == admission(reserved=8, in_flight=8), "a refused transition changes nothing"


def test_state_survives_json():
    state = admission(ahead=1, concurrency=12)
    admit_all(state)
    state.release(3)
    again = Admission.model_validate_json(state.model_dump_json())
    assert again == state
    assert admit_all(again) == admit_all(state) == []
