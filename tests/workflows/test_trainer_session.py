"""How a run handles its lease's messages."""

import pytest

from activities.failure_types import FailureKind
from activities.messages import LeaseGrant
from everburn.config import parse_config
from everburn.records.ids import RunRef
from workflows.messages import LeaseEnded
from workflows.run.session import LeaseFailedError, TrainerSession
from workflows.run.state import RunState


def test_a_late_message_of_an_ended_lease_changes_nothing():
    """The run was held by an exhausted quota, which an operation had reported, and then continues.
    If the holder's report of the same failure counted, the run would be held again."""
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
