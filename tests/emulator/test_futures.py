import asyncio
from collections.abc import Callable

import pytest

from everburn.emulator.errors import InvalidInput, SequenceBroken
from everburn.emulator.training.futures import Operation, OperationQueue, Promise
from everburn.emulator.training.operations import single_slice


def operation(seq_id: int, name: str = "forward") -> Operation:
    fingerprint = f"{name}-{seq_id}".encode()
    return Operation(name, seq_id, fingerprint, Promise(f"r{seq_id}"), lambda: single_slice(dict))


class Log:
    """A queue whose operations finish when the test calls `finished`."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.queue = OperationQueue("run-1", lambda turn: self.started.append(turn.seq_id))

    def put(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.queue.put(operation(seq_id))


@pytest.fixture
def log() -> Log:
    return Log()


async def test_operations_run_in_order_one_at_a_time(log: Log) -> None:
    log.put(3, 2)
    assert log.started == []
    log.put(1)
    assert log.started == [1]
    log.queue.finished()
    assert log.started == [1, 2]
    log.queue.finished()
    log.queue.finished()
    log.put(4)
    assert log.started == [1, 2, 3, 4]


async def test_a_repeated_submission_is_the_same_operation(log: Log) -> None:
    first = operation(1)
    log.queue.put(first)
    assert log.queue.find(1, first.fingerprint) is first.promise
    log.queue.finished()
    assert log.queue.find(1, first.fingerprint) is first.promise
    assert log.queue.find(2, first.fingerprint) is None


async def test_a_seq_id_cannot_be_reused_for_another_operation(log: Log) -> None:
    log.queue.put(operation(1, "forward"))
    with pytest.raises(InvalidInput, match="different forward request"):
        log.queue.find(1, operation(1, "optim_step").fingerprint)


async def test_a_seq_id_below_the_first_is_refused(log: Log) -> None:
    with pytest.raises(InvalidInput, match="below 1"):
        log.put(0)


async def test_a_missing_predecessor_breaks_the_queue(log: Log) -> None:
    waiting = operation(3)
    log.put(1)
    log.queue.put(waiting)
    assert log.queue.break_if_stalled(0.0) == []  # 1 is still running
    log.queue.finished()
    assert log.queue.break_if_stalled(60.0) == []
    ((promise, error),) = log.queue.break_if_stalled(0.0)
    assert promise is waiting.promise
    assert "seq_id 2 of run-1 never arrived" in str(error)
    with pytest.raises(SequenceBroken):
        log.put(4)
    assert log.started == [1]


async def test_a_late_predecessor_does_not_break_the_queue(log: Log) -> None:
    log.put(2)
    log.put(1)
    log.queue.finished()
    log.queue.finished()
    assert log.queue.break_if_stalled(0.0) == []


async def test_a_closed_queue_starts_nothing(log: Log) -> None:
    log.put(1, 2)
    log.queue.close()
    log.queue.finished()
    assert log.started == [1]


async def test_a_result_can_be_read_any_number_of_times() -> None:
    promise = Promise("r1")
    early = asyncio.create_task(promise.wait(10))
    assert await promise.wait(0.0) is None
    promise.resolve(b"{}")
    assert await early == await promise.wait(0.0) == b"{}"


@pytest.mark.parametrize("end", [Promise.abandon, lambda promise: promise.resolve(b"{}")])
async def test_waiters_are_woken(end: Callable[[Promise], None]) -> None:
    promise = Promise("r1")
    waiting = asyncio.create_task(promise.wait(10))
    await asyncio.sleep(0)
    end(promise)
    await asyncio.wait_for(waiting, 5)
