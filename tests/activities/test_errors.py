"""The table of errors: which failure each error becomes, and which failures Temporal retries."""

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities.errors import RULES, failure_of
from activities.failure_types import FailureKind, application_error, kind_of
from activities.messages import RolloutOrder
from everburn import RecoverableRolloutError
from everburn.records.ids import GroupKey, RunRef
from everburn.records.publications import StaleLeaseError
from everburn.records.store import CorruptArtifactError, StoreError, StoreFullError
from everburn.trainers.protocol import (
    TrainerCapacityError,
    TrainerFailedError,
    TrainerStateLostError,
)
from everburn.usercode.entrypoints import EntrypointError
from support.activities import execute

RUN = RunRef(store="s3://bucket", id="run")
ROLLOUT = RolloutOrder(run=RUN, group=GroupKey(cursor=7), completion=1, version=0)


@pytest.mark.parametrize(
    ("error", "type", "retryable"),
    [
        (StoreError("can't read it"), "StoreError", True),
        (StoreFullError("no space"), "StoreFullError", True),
        (CorruptArtifactError("it isn't JSON"), "CorruptArtifactError", False),
        (RPCError("no answer", RPCStatusCode.UNAVAILABLE, b""), "RPCError", True),
        (ValueError("it makes no sense"), "ValueError", False),
        (EntrypointError("no such module"), FailureKind.WORKER_UNFIT, True),
        (StaleLeaseError("lease 1"), FailureKind.TRAINER_STATE_LOST, False),
        (TrainerStateLostError("it restarted"), FailureKind.TRAINER_STATE_LOST, False),
        (TrainerFailedError("it has failed"), FailureKind.TRAINER_FAILED, False),
        (TrainerCapacityError("all are taken"), FailureKind.CAPACITY, True),
    ],
)
async def test_an_error_becomes_the_failure_of_its_rule(
    error: Exception, type: str, retryable: bool
) -> None:
    async def activity(run: RunRef) -> None:
        raise error

    with pytest.raises(ApplicationError, match=str(error)) as caught:
        await execute(activity, RUN)
    assert (caught.value.type, caught.value.non_retryable) == (type, not retryable)
    assert caught.value.__cause__ is error


def test_a_special_case_comes_before_its_base_class() -> None:
    """The first rule that matches applies."""
    seen: list[type[BaseException]] = []
    for error in RULES:
        assert not [base for base in seen if issubclass(error, base)]
        seen.append(error)


async def test_a_timeout_in_user_code_is_recoverable_and_a_bug_is_not() -> None:
    for error, kind in ((TimeoutError("judge"), FailureKind.RECOVERABLE), (KeyError("a"), None)):
        failure = failure_of(error, ROLLOUT)
        assert kind_of(failure) == kind
        assert failure.message.startswith("run run · row 7 · completion 1: ")
    assert kind_of(failure_of(TimeoutError("not of user code"), RUN)) is None


@pytest.mark.parametrize("order", [ROLLOUT, RUN])
def test_a_user_error_named_like_an_everburn_error_stays_a_user_error(order: object) -> None:
    """Otherwise the run would wait forever for its own store."""
    theirs = type("StoreError", (Exception,), {"__module__": "their_task"})
    failure = failure_of(theirs("their database"), order)
    assert (failure.type, failure.non_retryable) == ("their_task.StoreError", True)
    assert kind_of(failure) is None


def test_an_application_error_keeps_its_failure_kind() -> None:
    failure = application_error(RecoverableRolloutError("asleep"), kind=FailureKind.RECOVERABLE)
    assert kind_of(failure) is FailureKind.RECOVERABLE
