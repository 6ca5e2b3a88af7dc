"""Workers come and go: their activities are retried, and worker failures count against no row."""

import asyncio
import time
from datetime import timedelta

import pytest
from temporalio import activity

from activities import heartbeats
from everburn.records.store import ArtifactStore
from everburn.rollouts import attempt
from everburn.rollouts.sandboxes import Sandboxes, sandbox_keys
from support.farm import Farm, Run, Start
from support.sandboxes import noted
from support.script import Draw, Script
from support.waiting import Gate, until
from workers import processes
from workflows.children import prompt_group


@pytest.fixture(autouse=True)
def short_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_group, "HEARTBEAT_TIMEOUT", timedelta(seconds=1))


async def test_rollouts_of_a_worker_that_shuts_down_are_retried_by_another(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "GRACE", timedelta(seconds=0.1))
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.retry == 0:
            await gate.passed()
        return draw.completion

    async with tunable_farm.other_rollout_worker():
        run = await start_tuned(Script(play), rows=1, completions_per_prompt=12, min_group_size=12)
        await until(lambda: len(run.script.begun) == 12)
    # The remaining worker may finish its own rollouts; those of the other are started again.
    await until(lambda: len(run.script.cancelled) > 0 and len(run.script.begun) > 12)
    gate.open()
    await run.result()
    lost = {draw.place for draw in run.script.cancelled}
    assert all(len(run.script.draws(*place)) == 2 for place in lost)
    assert len(run.script.begun) == 12 + len(lost)
    assert run.trained == ["0"]
    last = run.metrics("producer/event")[-1]
    assert last["producer/recoverable_errors_total"] == 0
    assert last["producer/breaker_consecutive_failures"] == 0


async def test_a_frozen_worker_is_replaced_and_changes_nothing_when_it_is_back(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    beat = heartbeats._beat
    back = Gate()
    beating: list[str] = []

    async def beat_unless_first(interval: timedelta) -> None:
        if activity.info().activity_type == "rollout":
            beating.append(activity.info().activity_id)
            if len(beating) <= 2:
                await asyncio.Event().wait()
        await beat(interval)

    async def play(draw: Draw) -> float:
        if draw.retry == 0:
            await back.passed()
        return 10.0 * draw.retry + draw.completion

    monkeypatch.setattr(heartbeats, "_beat", beat_unless_first)
    run = await start_tuned(Script(play), rows=2, prompt_groups_per_step=1)
    await until(lambda: "0" in run.trained)
    back.open()
    await run.result()
    assert run.trained == ["0", "1"]
    await until(lambda: len(run.script.ended) == 6)
    assert run.groups[0].rewards == [10.0, 11.0]
    for member in run.groups[0].members:
        run.store.get(member.stored)  # checks the digest
    assert len(run.script.draws(row=0)) == 4
    last = run.metrics("producer/event")[-1]
    assert last["producer/recoverable_errors_total"] == 0


async def test_a_worker_that_is_back_reaps_no_sandbox_of_its_successor(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    beat, reap_at_end = heartbeats._beat, attempt.reap_at_end
    begun, back, settled = Gate(), Gate(), Gate()
    beating: list[str] = []
    ended: list[str] = []
    runs: list[Run] = []

    async def beat_unless_first(interval: timedelta) -> None:
        if activity.info().activity_type == "rollout":
            beating.append(activity.info().activity_id)
            if len(beating) == 1:
                await asyncio.Event().wait()
        await beat(interval)

    async def note_its_end(store: ArtifactStore, owner: str) -> None:
        await reap_at_end(store, owner)
        ended.append(owner)

    def number(draw: Draw) -> int:
        return 500 + 10 * draw.completion + draw.retry

    async def play(draw: Draw) -> float:
        await begun.passed()
        await Sandboxes(runs[0].store).register("support.sandboxes:note", number=number(draw))
        await (settled if draw.retry else back).passed()
        return float(draw.completion)

    monkeypatch.setattr(heartbeats, "_beat", beat_unless_first)
    monkeypatch.setattr(attempt, "reap_at_end", note_its_end)
    runs.append(run := await start_tuned(Script(play), rows=1))
    begun.open()
    await until(lambda: any(draw.retry for draw in run.script.begun))
    (successor,) = (draw for draw in run.script.begun if draw.retry)
    await until(lambda: number(successor) - 1 in noted)
    await until(lambda: len(sandbox_keys(run.store)) == 2)
    back.open()
    await until(lambda: len(ended) == 2)
    assert number(successor) not in noted, "the first attempt has ended, and the second continues"
    assert len(sandbox_keys(run.store)) == 1
    settled.open()
    await run.result()
    assert number(successor) in noted and sandbox_keys(run.store) == []
    assert run.trained == ["0"]


async def test_code_that_blocks_for_longer_than_a_heartbeat_keeps_its_work(
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
