"""The server's limits: a wide window works, and a wider one is reduced to them."""

import asyncio

import pytest

from support.farm import Start
from support.script import Draw, Script, spread
from support.waiting import Gate, until
from workflows.run.producer import MAX_GROUPS_OUT


@pytest.mark.chaos  # some 1,100 rollouts take half a minute
async def test_a_window_beyond_the_limits_is_reduced_to_them(start: Start):
    wide = MAX_GROUPS_OUT * 2
    assert wide >= 1024
    gate = Gate()

    async def play(draw: Draw) -> float:
        await gate.passed()
        return await spread(draw)

    run = await start(
        Script(play=play),
        rows=560,
        prompt_groups_per_step=280,
        max_head_offpolicy_versions=1,
        max_concurrency_rollout_sample=2 * wide,
    )
    await until(lambda: len(run.script.begun) == wide, lambda: len(run.script.begun), patience=300)
    status = await run.status()
    assert status.samples_in_flight == wide
    assert status.groups_in_flight == MAX_GROUPS_OUT

    gate.open()
    await asyncio.wait_for(run.handle.result(), 300)
    assert sorted(map(int, run.trained)) == list(range(560))
    assert len(run.script.begun) == 2 * 560
