"""Advantages from the run's own function, and groups of one."""

from typing import Any

import pytest

from support.farm import Start
from support.script import Script, spread

REWARD = {"name": "support.losses:reward_itself"}


async def test_groups_of_one_train_if_the_function_supports_them(start: Start):
    async def play(draw: Any) -> float:
        return float(draw.row)

    run = await start(Script(play), rows=3, completions_per_prompt=1, advantages=REWARD)
    result = await run.result()
    assert result.steps == 3
    assert [entry.updated for entry in run.ledger] == [False, True, True]
    sent = [[datum.advantages.tolist() for datum in datums] for datums in run.trainer.datums]
    assert sent == [[[1.0, 1.0]], [[2.0, 2.0]]]


async def test_a_function_that_needs_several_rewards_is_refused_for_groups_of_one(
    start: Start,
):
    fields = {"completions_per_prompt": 1, "advantages": {"name": "support.losses:nothing"}}
    run = await start(Script(), rows=3, **fields)
    failure = await run.failure()
    assert failure.type == "InvalidAdvantagesError"
    assert "support.losses:nothing gives a single reward no advantage" in failure.message
    assert (run.script.begun, run.trainer.calls) == ([], [])


@pytest.mark.parametrize("name", ["too_few", "no_list"])
async def test_an_invalid_result_of_the_function_is_refused_with_its_row(start: Start, name: str):
    run = await start(Script(spread), rows=1, advantages={"name": f"support.losses:{name}"})
    failure = await run.failure()
    assert failure.type == "InvalidAdvantagesError"
    assert f"run {run.id} · row 0 · advantages: InvalidAdvantagesError: support" in failure.message
