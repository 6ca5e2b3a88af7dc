"""User functions that don't return are given up; later calls still run."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from everburn.trainers.serverless import RESULT_TIMEOUT
from everburn.usercode import limits
from everburn.usercode.limits import LimitedLoop, UserCodeStuckError, limited
from workflows.run.session import MUTATION_TIMEOUT


@pytest.fixture
def loop() -> Iterator[LimitedLoop]:
    limited_loop = LimitedLoop("test")
    yield limited_loop
    limited_loop.close()


@pytest.fixture
def free() -> Iterator[threading.Event]:
    """Releases the code that a test has blocked, at the latest when the test ends."""
    event = threading.Event()
    yield event
    event.set()


async def answer() -> int:
    return 7


async def test_a_function_that_never_returns_is_given_up_and_cancelled(
    loop: LimitedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    monkeypatch.setattr(limits, "LIMIT", 0.1)
    with pytest.raises(UserCodeStuckError, match=r"hasn't returned within 0\.1 s"):
        await loop.run(hang)
    assert await asyncio.to_thread(cancelled.wait, 10)
    monkeypatch.setattr(limits, "LIMIT", 30.0)
    assert await loop.run(answer) == 7


async def test_another_loop_takes_the_place_of_one_that_is_blocked(
    loop: LimitedLoop, free: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def block() -> None:
        free.wait(60)

    monkeypatch.setattr(limits, "LIMIT", 0.1)
    with pytest.raises(UserCodeStuckError):
        await loop.run(block)
    monkeypatch.setattr(limits, "LIMIT", 30.0)
    assert await loop.run(answer) == 7


async def test_one_loop_serves_all_calls_that_return(loop: LimitedLoop) -> None:
    """A client that user code has opened in one call is usable in the next."""

    async def here() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert await loop.run(here) is await loop.run(here)


async def test_a_timeout_raised_by_the_function_is_an_ordinary_error() -> None:
    async def fail() -> None:
        raise TimeoutError("the judge doesn't answer")

    with pytest.raises(TimeoutError, match="the judge doesn't answer"):
        await limited(fail())


def test_the_function_is_given_up_before_its_activity_is() -> None:
    """Otherwise the lease would fail, and its error would not name the function."""
    assert MUTATION_TIMEOUT.total_seconds() > RESULT_TIMEOUT + limits.LIMIT
