"""What a run makes of its lease's messages."""

import pytest

from activities.failure_types import FailureKind
from activities.messages import LeaseGrant
from everburn.config import parse_config
from everburn.records.ids import RunRef
from workflows.messages import LeaseEnded
from workflows.run.session import LeaseFailedError, TrainerSession
from workflows.run.state import RunState


def test_what_a_lease_says_late_of_its_end_changes_nothing():
    """The run was held by a quota, as an operation had told it, and then goes on: were the holder's
    word on it taken in meanwhile, the run would be held again."""
    config = parse_config(
        {"rollout": "task:make", "dataset": "rows.jsonl", "base_model": "m", "backend": "emulator"}
    )
    state = RunState.initial(RunRef(store="runs", id="run"), config, 0.0)
    state.lease.lease_epoch = 1
    state.lease.grant = LeaseGrant(
        incarnation=0, lease_epoch=1, task_queue="queue", session="session", holder="holder"
    )
    session = TrainerSession(state, config)
    acted_on = LeaseEnded(
        incarnation=0, lease_epoch=1, error="add credit", error_type=FailureKind.TRAINER_STATE_LOST
    )
    session.on_ended(acted_on)
    session.on_ended(
        LeaseEnded(incarnation=0, lease_epoch=1, error="add credit", error_type=FailureKind.QUOTA)
    )
    assert state.lease.end == acted_on
    with pytest.raises(LeaseFailedError) as caught:
        session.check()
    assert caught.value.kind == FailureKind.TRAINER_STATE_LOST
