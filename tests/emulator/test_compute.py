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


class Outcome:
    def __init__(self) -> None:
        self._settled = threading.Event()
        self.result: object = None
        self.error: Exception | None = None

    def __call__(self, result: object, error: Exception | None) -> None:
        self.result, self.error = result, error
        self._settled.set()

    def wait(self) -> "Outcome":
        assert self._settled.wait(PATIENCE)
        return self


def counting(log: list[str], name: str, slices: int) -> Work[str]:
    for _ in range(slices):
        log.append(name)
        yield
    return name


def test_work_returns_its_result_or_its_error(compute: ComputeThread) -> None:
    def failing() -> Work[None]:
        yield
        raise ValueError("no")

    good, bad = Outcome(), Outcome()
    compute.submit(failing(), bad)
    compute.submit(counting([], "done", 2), good)
    assert good.wait().result == "done"
    assert isinstance(bad.wait().error, ValueError)


def test_works_take_turns(compute: ComputeThread) -> None:
    log: list[str] = []
    gate = threading.Event()

    def hold() -> Work[None]:
        gate.wait(PATIENCE)
        yield

    last = Outcome()
    compute.submit(hold(), Outcome())
    compute.submit(counting(log, "long", 4), last)
    compute.submit(counting(log, "short", 2), Outcome())
    gate.set()
    last.wait()
    assert log == ["long", "short", "long", "short", "long", "long"]


def test_sampling_goes_on_beside_long_work(compute: ComputeThread, tiny: Base) -> None:
    sampled = threading.Event()

    def endless() -> Work[int]:
        slices = 0
        while not sampled.is_set():
            slices += 1
            threading.Event().wait(0.005)
            yield
        return slices

    training = Outcome()
    compute.submit(endless(), training)
    ticket = Ticket([1, 2], SamplingParams(max_tokens=30, seed=2), lambda done: sampled.set())
    compute.sample("base", lambda: open_batch(tiny), ticket)
    assert training.wait().result is not None
    assert ticket.completion is not None


def test_weights_that_cannot_be_opened_fail_their_request(compute: ComputeThread) -> None:
    def broken() -> object:
        raise ValueError("no such weights")

    outcome = threading.Event()
    ticket = Ticket([1], SamplingParams(max_tokens=1), lambda done: outcome.set())
    compute.sample("lost", broken, ticket)  # type: ignore[arg-type]
    assert outcome.wait(PATIENCE)
    assert isinstance(ticket.error, ValueError)


def test_forgetting_weights_fails_the_requests_that_use_them(
    compute: ComputeThread, tiny: Base
) -> None:
    gate, outcome = threading.Event(), threading.Event()

    def hold() -> Work[None]:
        gate.wait(PATIENCE)
        yield

    compute.submit(hold(), Outcome())
    ticket = Ticket([1], SamplingParams(max_tokens=100), lambda done: outcome.set())
    compute.sample("policy", lambda: open_batch(tiny), ticket)
    compute.forget("policy", LookupError("gone"))
    gate.set()
    assert outcome.wait(PATIENCE)
    assert isinstance(ticket.error, LookupError)
