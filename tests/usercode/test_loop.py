"""The loop of user code: it doesn't block its worker, and blocking code is reported."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from everburn.usercode import loop as user_loop_module
from everburn.usercode.loop import BlockingError, LoopBlockedError, UserLoop
from support.threads import hanging
from support.waiting import until


@pytest.fixture
def user_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[UserLoop]:
    monkeypatch.setattr(user_loop_module, "TICK", 0.01)
    monkeypatch.setattr(user_loop_module, "GRACE", 0.05)
    monkeypatch.setattr(user_loop_module, "DEFAULT_LIMIT", 0.2)
    loop = UserLoop("test")
    yield loop
    loop.close()


class Block:
    """User code that blocks its loop until it is released."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.free = threading.Event()

    async def __call__(self) -> None:
        self.begun.set()
        self.free.wait(30)


@pytest.fixture
def block() -> Iterator[Block]:
    blocking = Block()
    yield blocking
    blocking.free.set()


async def test_code_that_blocks_for_too_long_is_reported_with_its_place(
    user_loop: UserLoop, block: Block
) -> None:
    work = asyncio.create_task(user_loop.run(block, may_block=0.1))
    stack = await asyncio.wait_for(user_loop.blocked(), 10)
    assert "in __call__" in stack and "self.free.wait(30)" in stack
    with pytest.raises(BlockingError):
        await work


async def test_other_calls_learn_that_another_call_blocks_the_loop(
    user_loop: UserLoop, block: Block
) -> None:
    """This holds even if the blocking code runs in a task that it created itself."""

    async def make_a_task() -> None:
        await asyncio.create_task(block())

    beside = asyncio.create_task(user_loop.run(asyncio.Event().wait, may_block=0.1))
    await asyncio.sleep(0.05)
    work = asyncio.create_task(user_loop.run(make_a_task, may_block=0.1))
    await asyncio.wait_for(user_loop.blocked(), 10)
    with pytest.raises(LoopBlockedError):
        await beside
    with pytest.raises(BlockingError):
        await work
    with pytest.raises(LoopBlockedError):
        await user_loop.run(asyncio.Event().wait)


async def test_the_longest_limit_of_the_running_calls_counts(
    user_loop: UserLoop, block: Block
) -> None:
    """A call counts until the loop has run again: even if it was cancelled, it may be the one that
    blocks."""
    patient = asyncio.create_task(user_loop.run(asyncio.Event().wait, may_block=3600))
    await asyncio.sleep(0)
    blocking = asyncio.create_task(user_loop.run(block, may_block=0.1))
    watching = asyncio.create_task(user_loop.blocked())
    await until(block.begun.is_set)
    patient.cancel()
    done, _ = await asyncio.wait([watching], timeout=0.5)
    assert not done
    block.free.set()
    await blocking
    watching.cancel()


async def test_the_limit_of_an_ended_call_no_longer_counts(
    user_loop: UserLoop, block: Block
) -> None:
    """A factory may block for minutes; rollouts that begin right after it may not."""

    async def load() -> None:
        pass

    watching = asyncio.create_task(user_loop.blocked())
    await user_loop.run(load, may_block=3600)
    work = asyncio.create_task(user_loop.run(block, may_block=0.1))
    await asyncio.wait_for(watching, 10)
    with pytest.raises(BlockingError):
        await work


async def test_a_loop_that_still_runs_is_not_blocked(user_loop: UserLoop) -> None:
    async def work() -> None:
        for _ in range(20):
            time.sleep(0.03)  # noqa: ASYNC251 - user code does such things
            await asyncio.sleep(0)

    watching = asyncio.create_task(user_loop.blocked())
    await user_loop.run(work, may_block=0.1)
    assert not watching.done()
    watching.cancel()


async def test_code_without_a_caller_has_the_default_limit(
    user_loop: UserLoop, block: Block
) -> None:
    async def start() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, lambda: loop.create_task(block()))

    begun = time.monotonic()
    await user_loop.run(start)
    await until(block.begun.is_set)
    await asyncio.wait_for(user_loop.blocked(), 10)
    assert time.monotonic() - begun >= user_loop_module.DEFAULT_LIMIT


async def test_a_closing_loop_lets_its_calls_clean_up(
    user_loop: UserLoop,
) -> None:
    """Calls that were cancelled before and calls that closing cancels can clean up; calls that take
    too long are cut off."""
    begun, ended, closed = [], [], threading.Event()

    def call(name: str) -> Callable[[], Awaitable[None]]:
        async def work() -> None:
            aside = asyncio.create_task(asyncio.Event().wait())
            begun.append(name)
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)
                assert not aside.done()
                ended.append(name)

        return work

    given_up = asyncio.create_task(user_loop.run(call("given up")))
    running = asyncio.create_task(user_loop.run(call("running")))
    await until(lambda: len(begun) == 2)
    given_up.cancel()
    await asyncio.wait([given_up])
    assert not ended
    user_loop.close(closed.set)
    assert await asyncio.to_thread(user_loop.join, 10)
    assert (sorted(ended), closed.is_set()) == (["given up", "running"], True)
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_call_that_never_ends_does_not_keep_a_closing_loop_open(
    user_loop: UserLoop, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_loop_module, "CLOSE_TIMEOUT", 0.1)

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            block.begun.set()
            await asyncio.Event().wait()

    work = asyncio.create_task(user_loop.run(linger))
    await asyncio.sleep(0.05)
    user_loop.close()
    assert await asyncio.to_thread(user_loop.join, 10)
    assert block.begun.is_set()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_closing_does_not_wait_for_a_blocked_loop(user_loop: UserLoop, block: Block) -> None:
    work = asyncio.create_task(user_loop.run(block))
    await until(block.begun.is_set)
    user_loop.close()
    assert not await asyncio.to_thread(user_loop.join, 0.05)
    block.free.set()
    await asyncio.wait([work])


async def test_code_that_fills_its_thread_pool_delays_no_connection(
    user_loop: UserLoop,
) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "localhost", 0)
    port = server.sockets[0].getsockname()[1]

    async def connect() -> None:
        user_code.take_all()
        _, writer = await asyncio.open_connection("localhost", port)
        writer.close()

    with hanging() as user_code:
        async with server, asyncio.timeout(10):
            await user_loop.run(connect)
