"""Workers come and go: what they were doing is done again, and nobody is blamed for it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from temporalio.worker import Worker

from activities.rollouts import RolloutActivities
from support.farm import Farm, Start
from support.script import Draw, Script
from support.waiting import Gate, until
from workers import processes
from workflows import prompt_group


@pytest.fixture(autouse=True)
def short_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_group, "HEARTBEAT_TIMEOUT", timedelta(seconds=1))


async def test_rollouts_of_a_worker_that_shuts_down_are_done_again_by_another(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "GRACE", timedelta(seconds=0.1))
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.tries == 0:
            await gate.passed()
        return draw.completion

    async with tunable_farm.other_rollout_worker():
        run = await start_tuned(Script(play), rows=1, completions_per_prompt=6, min_group_size=6)
        await until(lambda: len(run.script.begun) == 6)
    # What the worker that is left has begun, it may finish; what the other had is begun again.
    await until(lambda: len(run.script.cancelled) > 0 and len(run.script.begun) > 6)
    gate.open()
    await run.result()
    lost = {draw.place for draw in run.script.cancelled}
    assert all(len(run.script.draws(*place)) == 2 for place in lost)
    assert len(run.script.begun) == 6 + len(lost)
    assert run.trained == ["0"]
    last = run.metrics("producer/event")[-1]
    assert last["producer/recoverable_errors_total"] == 0
    assert last["producer/breaker_consecutive_failures"] == 0


async def test_code_that_blocks_its_loop_for_longer_than_a_heartbeat_keeps_its_work(
    start_tuned: Start,
):
    async def play(draw: Draw) -> float:
        if draw.completion == 0:
            time.sleep(2.5)  # noqa: ASYNC251 - user code does such things
        return draw.completion

    run = await start_tuned(Script(play), rows=1)
    await run.result()
    assert len(run.script.begun) == 2
    assert run.trained == ["0"]
