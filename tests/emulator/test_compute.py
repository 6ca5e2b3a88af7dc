"""Training and sampling on one thread."""

import threading
from collections.abc import Iterator

import pytest

from everburn.emulator.compute import ComputeThread, Work
from everburn.emulator.models.bases import Base
from everburn.emulator.sampling.distribution import SamplingParams
from everburn.emulator.sampling.sampler import Ticket
from support.emulator import PATIENCE

from .test_sampler import open_batch


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    thread = ComputeThread()
    thread.start()
    yield thread
    thread.stop()


def counting(log: list[str], name: str, slices: int) -> Work[str]:
    for _ in range(slices):
        log.append(name)
        yield
    return name


def test_work_returns_its_result_or_its_error(compute: ComputeThread) -> None:
    def failing() -> Work[None]:
        yield
        raise ValueError("no")

    bad = compute.submit(failing())
    good = compute.submit(counting([], "done", 2))
    assert good.result(PATIENCE) == "done"
    assert isinstance(bad.exception(PATIENCE), ValueError)


def test_works_take_turns(compute: ComputeThread) -> None:
    log: list[str] = []
    gate = threading.Event()

    def hold() -> Work[None]:
        gate.wait(PATIENCE)
        yield

    compute.submit(hold())
    last = compute.submit(counting(log, "long", 4))
    compute.submit(counting(log, "short", 2))
    gate.set()
    last.result(PATIENCE)
    assert log == ["long", "short", "long", "short", "long", "long"]


def test_sampling_continues_during_long_work(compute: ComputeThread, tiny: Base) -> None:
    ticket = Ticket([1, 2], SamplingParams(max_tokens=30, seed=2))

    def endless() -> Work[None]:
        while not ticket.completion.done():
            threading.Event().wait(0.005)
            yield

    training = compute.submit(endless())
    compute.sample("base", lambda: open_batch(tiny), ticket)
    training.result(PATIENCE)
    assert ticket.completion.result(0).tokens


def test_weights_that_cannot_be_opened_fail_their_request(compute: ComputeThread) -> None:
    def broken() -> object:
        raise ValueError("no such weights")

    ticket = Ticket([1], SamplingParams(max_tokens=1))
    compute.sample("lost", broken, ticket)  # type: ignore[arg-type]
    assert isinstance(ticket.completion.exception(PATIENCE), ValueError)


def test_forgetting_weights_fails_the_requests_that_use_them(
    compute: ComputeThread, tiny: Base
) -> None:
    gate = threading.Event()

    def hold() -> Work[None]:
        gate.wait(PATIENCE)
        yield

    compute.submit(hold())
    ticket = Ticket([1], SamplingParams(max_tokens=100))
    compute.sample("policy", lambda: open_batch(tiny), ticket)
    compute.forget("policy", LookupError("gone"))
    gate.set()
    assert isinstance(ticket.completion.exception(PATIENCE), LookupError)


def test_a_cancelled_waiter_does_not_stop_the_thread(compute: ComputeThread) -> None:
    first = compute.submit(counting([], "first", 1))
    assert not first.cancel()
    assert compute.submit(counting([], "second", 1)).result(PATIENCE) == "second"
