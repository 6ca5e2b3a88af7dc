"""User code that blocks forever: its worker names it before the server times out all
completions."""

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from activities.contracts import LOAD_TIMEOUT
from everburn.rollouts.attempt import STORE_PATIENCE
from everburn.rollouts.sandboxes import END_TIMEOUT
from everburn.usercode import loop
from everburn.usercode.loop import GRACE
from support.farm import Farm, Start
from support.script import Draw, Script
from support.waiting import until
from workers import processes
from workflows.children import prompt_group, retries

DEADLINE = 2.0
BEGINS = 0.5
QUEUE = "of a worker that code blocks"


@pytest.fixture
def free() -> Iterator[threading.Event]:
    """Set after the test, so that the thread can end."""
    event = threading.Event()
    yield event
    event.set()


async def test_code_that_blocks_late_counts_only_for_its_own_completion(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch, free: threading.Event
):
    """The code blocks so late that the worker, which waits for two deadlines, notices it after one
    deadline and the overtime."""
    for module in (processes, prompt_group):
        monkeypatch.setattr(module, "ROLLOUT_QUEUE", QUEUE)
    monkeypatch.setattr(processes, "GRACE", timedelta(seconds=0.1))
    monkeypatch.setattr(prompt_group, "OVERTIME", timedelta(seconds=0.1))
    monkeypatch.setattr(retries, "MAX_FAILURES", 1)
    monkeypatch.setattr(loop, "GRACE", 0.2)
    monkeypatch.setattr(loop, "TICK", 0.2)
    script = Script()

    async def play(draw: Draw) -> float:
        if draw.retry:
            return draw.completion
        await until(lambda: len(script.begun) == 3)
        if draw.completion == 1:
            await asyncio.sleep(BEGINS)
            free.wait()
        await asyncio.Event().wait()
        raise AssertionError("it waits forever")

    script.play = play
    async with tunable_farm.other_rollout_worker() as blocked:
        run = await start_tuned(script, rows=1, completions_per_prompt=3, rollout_timeout=DEADLINE)
        assert "free.wait()" in await asyncio.wait_for(blocked.blocked(), 60)
    async with tunable_farm.other_rollout_worker():
        await run.result()
    (group,) = run.groups
    (lost,) = group.lost
    assert lost.completion == 1 and "it blocks its worker forever" in (lost.error or "")
    assert [member.completion for member in group.members] == [0, 2]


@pytest.mark.parametrize("deadline", [1.0, 3600.0])
def test_blocking_code_is_found_before_the_server_times_completions_out(deadline: float):
    """This holds even if each earlier phase has used all of its time."""
    begins = LOAD_TIMEOUT + STORE_PATIENCE + END_TIMEOUT + deadline + END_TIMEOUT
    known = begins + deadline + GRACE
    assert timedelta(seconds=known) < prompt_group.completion_limit(deadline)
