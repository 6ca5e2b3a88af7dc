"""User code that is ended early gets an error that says why."""

import asyncio

import pytest

from everburn.usercode.deadlines import SelfCancelledError, shielded, user_timeout


async def test_a_missed_deadline_is_named_in_the_error() -> None:
    with pytest.raises(TimeoutError, match=r"^not finished within rollout_timeout \(0\.01 s\)$"):
        async with user_timeout(0.01, "rollout_timeout"):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError, match=r"^not finished within 0\.01 s$"):
        async with user_timeout(0.01):
            await asyncio.Event().wait()


async def test_code_that_ends_in_time_is_unaffected() -> None:
    async with user_timeout(60, "rollout_timeout"):
        await asyncio.sleep(0)
    async with user_timeout(None):
        await asyncio.sleep(0)
    for error in (TimeoutError("the judge is asleep"), KeyError("answer")):
        with pytest.raises(type(error)) as caught:
            async with user_timeout(60, "rollout_timeout"):
                raise error
        assert caught.value is error


async def test_a_cancellation_from_outside_passes() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        async with user_timeout(60):
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


@pytest.mark.parametrize("seconds", [60, None])
async def test_code_that_cancels_itself_raises_an_error(seconds: float | None) -> None:
    with pytest.raises(SelfCancelledError, match="without being cancelled"):
        async with user_timeout(seconds):
            aside = asyncio.create_task(asyncio.Event().wait())
            aside.cancel()
            await aside


async def test_nested_deadlines_are_distinguished() -> None:
    with pytest.raises(TimeoutError, match=r"^not finished within tool \(0\.01 s\)$"):
        async with user_timeout(60, "rollout_timeout"), user_timeout(0.01, "tool"):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError, match=r"^not finished within rollout_timeout \(0\.01 s\)$"):
        async with user_timeout(0.01, "rollout_timeout"), user_timeout(60, "tool"):
            await asyncio.Event().wait()


async def test_shielded_work_ends_however_often_its_caller_is_cancelled() -> None:
    begun, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def clean_up() -> None:
        begun.set()
        await go_on.wait()
        ended.set()

    caller = asyncio.create_task(shielded(clean_up()))
    await begun.wait()
    for _ in range(2):
        caller.cancel()
        await asyncio.sleep(0)
    assert not caller.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
