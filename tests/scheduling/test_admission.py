"""Admission, by example: G = 4 completions per row, P = 2 rows per step, B = 8."""

import pytest

from everburn.scheduling.admission import Admission


def admission(off_policy: int = 0, concurrency: int | None = None, **state: int) -> Admission:
    return Admission(
        group=4, batch=8, max_head_offpolicy_versions=off_policy, concurrency=concurrency, **state
    )


def admit_all(state: Admission) -> list[int]:
    """Admit rows while they fit; returns their version stamps."""
    stamps = []
    while state.can_admit():
        stamps.append(state.admit())
    return stamps


def test_on_policy_training_admits_exactly_one_batch():
    state = admission(off_policy=0)
    assert admit_all(state) == [0, 0]
    assert (state.capacity, state.reserved, state.in_flight) == (0, 8, 8)


@pytest.mark.parametrize("off_policy", [0, 1, 2, 5])
def test_a_new_run_admits_o_plus_one_batches(off_policy: int):
    assert len(admit_all(admission(off_policy))) == 2 * (off_policy + 1)


def test_a_publication_admits_one_batch_with_the_new_version():
    state = admission(off_policy=0)
    admit_all(state)
    for _ in range(2):
        state.release(4)
        state.accept()
    assert not state.can_admit()
    state.publish()
    assert admit_all(state) == [1, 1]


def test_acceptance_counts_a_whole_group():
    state = admission()
    state.admit()
    state.release(4)
    before = state.staleness_capacity
    state.accept()
    assert (state.accepted, state.reserved, state.staleness_capacity) == (4, 0, before)


def test_rejection_frees_capacity():
    state = admission()
    admit_all(state)
    state.release(4)
    state.reject()
    assert (state.accepted, state.reserved, state.capacity) == (0, 4, 4)
    assert state.can_admit()


def test_a_row_is_admitted_only_as_a_whole():
    state = admission(off_policy=3, concurrency=7)
    state.admit()
    assert state.capacity == 3
    assert not state.can_admit()
    state.release(1)
    assert state.capacity == 4
    assert state.can_admit()


def test_the_smaller_limit_applies():
    assert admission(off_policy=0, concurrency=100).capacity == 8
    assert admission(off_policy=9, concurrency=6).capacity == 6
    assert admission(off_policy=9).concurrency_capacity is None
    assert admission(off_policy=9).capacity == 80


def test_finished_calls_free_concurrency_but_not_staleness():
    state = admission(off_policy=0, concurrency=8)
    admit_all(state)
    state.release(8)
    assert (state.concurrency_capacity, state.staleness_capacity) == (8, 0)
    assert not state.can_admit()


def test_a_retry_keeps_the_reservation_and_needs_only_free_calls():
    state = admission(off_policy=0, concurrency=8)
    admit_all(state)
    assert not state.can_retry()
    state.release(4)
    state.publish()
    assert state.can_retry()
    assert state.retry() == 1
    assert (state.reserved, state.in_flight) == (8, 8)
    with pytest.raises(ValueError, match="no free calls for a retry"):
        state.retry()


def test_an_initial_version_does_not_change_capacity():
    assert (
        admission(off_policy=1, initial_version=7, version=7).capacity
        == admission(off_policy=1).capacity
    )


@pytest.mark.parametrize("untrained_groups", [0, 1, 3])
def test_a_resumed_runs_capacity_excludes_its_untrained_groups(untrained_groups: int):
    """accepted = v*B + untrained completions; capacity = (O+1)*B - untrained completions."""
    version, untrained = 5, 4 * untrained_groups
    state = admission(off_policy=2, version=version, accepted=version * 8 + untrained)
    assert state.capacity == 3 * 8 - untrained


def test_a_lowered_limit_admits_nothing_until_publications_catch_up():
    state = admission(off_policy=2, concurrency=24)
    admit_all(state)
    state.max_head_offpolicy_versions, state.concurrency = 0, 8
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


def test_invalid_transitions_are_errors():
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
    state = admission(off_policy=1, concurrency=12)
    admit_all(state)
    state.release(3)
    again = Admission.model_validate_json(state.model_dump_json())
    assert again == state
    assert admit_all(again) == admit_all(state) == []
