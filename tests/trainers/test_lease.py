"""A lease: each operation once, submissions in order, superseded leases refused."""

import asyncio

import pytest

from everburn.records.ids import LeaseKey
from everburn.records.publications import StaleLeaseError
from everburn.records.store import CorruptArtifactError, StoreError
from everburn.trainers.lease import Lease, OperationKey
from everburn.trainers.protocol import TrainerRejectedError, TrainerStateLostError
from support.trainer import ScriptedTrainer
from support.waiting import until

STEP = OperationKey(1, "optim_step")


class Operation:
    """An operation that counts its executions and ends on command."""

    def __init__(self) -> None:
        self.begun = 0
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> str:
        self.begun += 1
        return await self.end


@pytest.fixture
async def lease() -> Lease:
    return Lease(LeaseKey(1, 2), trainer=ScriptedTrainer())


async def test_a_repeated_operation_joins_the_first(lease: Lease) -> None:
    operation = Operation()
    callers = [asyncio.create_task(lease.once(lease.key, STEP, operation)) for _ in range(3)]
    await asyncio.sleep(0)
    operation.end.set_result("applied")

    assert await asyncio.gather(*callers) == ["applied"] * 3
    assert await lease.once(lease.key, STEP, operation) == "applied"
    assert operation.begun == 1


async def test_an_operation_outlives_a_cancelled_caller(lease: Lease) -> None:
    operation = Operation()
    first = asyncio.create_task(lease.once(lease.key, STEP, operation))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    operation.end.set_result("applied")

    assert await lease.once(lease.key, STEP, operation) == "applied"
    assert operation.begun == 1


@pytest.mark.parametrize("other", [LeaseKey(1, 1), LeaseKey(0, 2)], ids=["epoch", "incarnation"])
async def test_a_superseded_lease_is_refused(lease: Lease, other: LeaseKey) -> None:
    operation = Operation()
    with pytest.raises(StaleLeaseError, match=f"is for lease {other.text}; this is lease 2i1"):
        await lease.once(other, STEP, operation)
    assert operation.begun == 0


async def test_a_doubtful_operation_ends_the_lease(lease: Lease) -> None:
    doubtful, other = Operation(), Operation()
    doubtful.end.set_exception(TrainerStateLostError("it may have been applied"))
    with pytest.raises(TrainerStateLostError):
        await lease.once(lease.key, STEP, doubtful)

    with pytest.raises(TrainerStateLostError, match="may have been applied"):
        await lease.once(lease.key, OperationKey(1, "publish"), other)
    assert other.begun == 0
    assert lease.ended is not None and not lease.released


async def test_a_store_failure_ends_the_lease(lease: Lease) -> None:
    """The run's folder may not record what was applied."""
    unrecorded, other = Operation(), Operation()
    unrecorded.end.set_exception(StoreError("can't write it"))
    with pytest.raises(TrainerStateLostError, match="can't write it"):
        await lease.once(lease.key, STEP, unrecorded)

    with pytest.raises(TrainerStateLostError, match="can't write it"):
        await lease.once(lease.key, OperationKey(1, "publish"), other)
    assert other.begun == 0


@pytest.mark.parametrize(
    "error", [TrainerRejectedError("no such loss"), CorruptArtifactError("it has changed")]
)
async def test_an_error_of_the_request_does_not_end_the_lease(
    lease: Lease, error: Exception
) -> None:
    refused, other = Operation(), Operation()
    refused.end.set_exception(error)
    other.end.set_result("applied")
    with pytest.raises(type(error)):
        await lease.once(lease.key, STEP, refused)

    assert await lease.once(lease.key, OperationKey(1, "publish"), other) == "applied"
    assert lease.ended is None


async def test_submissions_are_sent_in_order_and_may_be_pending_together(
    lease: Lease,
) -> None:
    sent: list[int] = []
    ends = [asyncio.get_running_loop().create_future() for _ in range(3)]

    async def submit(number: int) -> str:
        async with lease.turn(1, number):
            sent.append(number)
        return await ends[number]

    later = [asyncio.create_task(submit(number)) for number in (2, 1)]
    await asyncio.sleep(0.01)
    assert sent == []
    first = asyncio.create_task(submit(0))
    await until(lambda: len(sent) == 3)
    assert sent == [0, 1, 2]
    for number in (2, 0, 1):
        ends[number].set_result(f"result {number}")

    assert await asyncio.gather(first, *later) == ["result 0", "result 2", "result 1"]


async def test_each_step_counts_its_submissions_from_zero(lease: Lease) -> None:
    taken = []
    for step in (1, 2):
        for submission in (0, 1):
            async with lease.turn(step, submission):
                taken.append((step, submission))
    assert taken == [(1, 0), (1, 1), (2, 0), (2, 1)]


async def test_a_waiting_submission_fails_when_the_lease_ends(lease: Lease) -> None:
    async def submit() -> None:
        async with lease.turn(1, 1):
            raise AssertionError("it isn't its turn")

    waiting = asyncio.create_task(submit())
    await asyncio.sleep(0)
    await lease.end(TrainerStateLostError("the session expired"))

    with pytest.raises(TrainerStateLostError, match="the session expired"):
        await waiting


async def test_a_released_lease_says_that_it_was_released(lease: Lease) -> None:
    await lease.release()
    await lease.wait_ended(0.0)

    assert lease.released
    with pytest.raises(TrainerStateLostError, match="was released"):
        await lease.once(lease.key, STEP, Operation())


async def test_an_operation_is_refused_after_its_step(lease: Lease) -> None:
    """Earlier results are dropped, but activities of a reset run may be dispatched again."""
    operation = Operation()
    operation.end.set_result("applied")
    for step in (1, 2, 3):
        for name in ("forward_backward", "optim_step"):
            await lease.once(lease.key, OperationKey(step, name), operation)
    begun = operation.begun
    for name in ("forward_backward", "optim_step", "replay_step"):
        with pytest.raises(TrainerStateLostError, match="comes too late: step 3 was taken"):
            await lease.once(lease.key, OperationKey(1, name), operation)
    assert operation.begun == begun
    assert (
        await lease.once(lease.key, OperationKey(3, "save_checkpoint", "state-3"), operation)
        == "applied"
    )
