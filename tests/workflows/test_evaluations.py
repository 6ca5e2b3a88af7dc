"""Evaluations: when they run, and what they record."""

import asyncio
from typing import Any

import pytest

from support.farm import Start
from support.script import Draw, Script
from support.waiting import Gate, until

HELD_OUT = {"name": "support.tasks:rows", "kwargs": {"count": 3}}


async def grade(draw: Draw) -> float:
    """Rewards of training rows differ; rewards of held-out rows rise with each version."""
    return float(draw.version) if draw.evaluation else float(draw.completion)


async def test_held_out_rows_are_reported_before_and_after(start: Start):
    run = await start(Script(grade), rows=1, evaluation_dataset=HELD_OUT, max_completion_tokens=77)
    result = await run.result()
    before, after = (run.store.get_json(f"eval-{when}.json") for when in ("before", "after"))
    assert (before["snapshot"], after["snapshot"]) == ("policy-0000-e1", "policy-0001-e1")
    assert (before["temperature"], before["max_tokens"]) == (0.0, 77)
    assert [sample["reward"] for sample in before["samples"]] == [0.0, 0.0, 0.0]
    assert [sample["reward"] for sample in after["samples"]] == [1.0, 1.0, 1.0]
    assert before["samples"][0] == {
        "prompt": "w1",
        "reward": 0.0,
        "info": {},
        "answer": "w2 w3",
        "output_tokens": 0,
        "at_token_limit": False,
    }
    assert {v: m["eval/reward"] for v, m in result.evaluations.items()} == {0: 0.0, 1: 1.0}
    records = {record["rollout/step"]: record for record in run.metrics()}
    assert records[0]["eval/reward"] == 0.0
    assert records[1]["eval/reward"] == 1.0
    assert {"eval/wall_time", "train/loss"} <= records[1].keys()
    # No held-out row is trained.
    assert run.trained == ["0"]
    assert sum(map(len, run.trainer.datums)) == 2


async def test_evaluations_run_once_at_the_start_at_intervals_and_at_the_end(start: Start):
    evaluated = []

    def evaluate(step: int, rollout_fn: Any) -> dict[str, float]:
        evaluated.append(step)
        return {"skill": step / 10}

    run = await start(Script(evaluate=evaluate), rows=3, evaluation_interval=2)
    result = await run.result()
    assert evaluated == [0, 2, 3]
    assert {version: m["eval/skill"] for version, m in result.evaluations.items()} == {0: 0, 3: 0.3}
    assert [r["eval/skill"] for r in run.metrics() if "eval/skill" in r] == [0, 0.2, 0.3]


async def test_an_evaluation_function_needs_no_context_to_sample(start: Start):
    """The scripted rollout function requires a cursor and a rollout index."""

    async def evaluate(step: int, rollout_fn: Any) -> dict[str, float]:
        drawn = [await rollout_fn({}), await rollout_fn({}), await rollout_fn({}, cursor_index=7)]
        return {"drawn": len(drawn)}

    run = await start(Script(evaluate=evaluate), rows=1)
    await run.result()
    drawn = [(d.row, d.completion) for d in run.script.begun if d.evaluation]
    assert drawn[:3] == [(0, 0), (1, 0), (7, 0)]


async def test_the_last_step_is_not_evaluated_twice(start: Start):
    evaluated = []

    def evaluate(step: int, rollout_fn: Any) -> dict[str, float]:
        evaluated.append(step)
        return {"skill": 1}

    run = await start(Script(evaluate=evaluate), rows=1, evaluation_interval=1)
    await run.result()
    assert evaluated == [0, 1]


async def test_a_snapshot_is_replaced_only_after_its_evaluation(start: Start):
    """Rollouts and the optimizer continue meanwhile, and the evaluation keeps its version."""
    gate = Gate()

    async def evaluate(step: int, rollout_fn: Any) -> dict[str, float]:
        first = await rollout_fn({}, cursor_index=0, rollout_idx=0)
        await gate.passed()
        second = await rollout_fn({}, cursor_index=1, rollout_idx=0)
        return {"skill": first.segments[0].reward + second.segments[0].reward}

    run = await start(
        Script(evaluate=evaluate), rows=2, evaluation_interval=5, max_head_offpolicy_versions=1
    )
    await until(lambda: "optim_step" in run.trainer.finished)
    await until(lambda: len(run.groups) == 2)
    status = await run.until(waiting_for="the evaluation of the current version")
    assert status.phase == "step 1: publishing"
    assert run.trainer.calls[-1] == "optim_step"

    gate.open()
    await run.result()
    versions = [draw.version for draw in run.script.begun if draw.evaluation]
    assert versions == [0, 0, 2, 2]


async def test_a_failing_evaluation_is_reported_and_training_continues(start: Start):
    def evaluate(step: int, rollout_fn: Any) -> dict[str, float]:
        if step == 0:
            raise KeyError("skill")
        if step == 3:
            return {f"skill-{index}": 1.0 for index in range(1000)}
        return {"skill": 1.0 if step == 1 else float("nan")}

    run = await start(Script(evaluate=evaluate), rows=3)
    result = await run.result()
    assert (result.rows, result.stopped) == (3, False)
    raised, not_a_number, too_many = (await run.status()).notes
    assert "returned 1000 figures of" in too_many
    assert raised.startswith("evaluation of version 0: ") and "KeyError: 'skill'" in raised
    assert not_a_number.startswith("evaluation of version 2: ")
    assert "returned skill=nan, not a finite number" in not_a_number
    records = {record["rollout/step"]: record for record in run.metrics()}
    assert [records[step].get("eval/failed") for step in range(4)] == [1, None, 1, 1]


async def test_an_evaluation_that_misses_its_deadline_is_given_up(start: Start):
    async def evaluate(step: int, rollout_fn: Any) -> dict[str, float]:
        if step == 0:
            await asyncio.sleep(60)
        return {"skill": step}

    run = await start(Script(evaluate=evaluate), rows=1, evaluation_timeout=0.5)
    await run.result()
    assert (await run.status()).notes == [
        "evaluation of version 0: not finished within evaluation_timeout (0.5 s)"
    ]


async def test_the_initial_evaluation_can_be_skipped(start: Start):
    run = await start(
        Script(grade),
        rows=2,
        evaluation_dataset=HELD_OUT,
        evaluation_interval=5,
        initial_evaluation=False,
    )
    result = await run.result()
    assert list(result.evaluations) == [2]
    assert not run.store.exists("eval-before.json")
    assert run.store.exists("eval-after.json")


@pytest.mark.parametrize(("broken", "trained"), [(0, []), (1, ["0"])])
async def test_a_failed_evaluation_ends_a_run_that_tolerates_no_failures(
    start: Start, broken: int, trained: list[str]
):
    never = Gate()

    async def play(draw: Draw) -> float:
        if draw.evaluation and draw.version == broken:
            raise RuntimeError("no grader here")
        if not draw.evaluation and broken == 0:
            # The run doesn't wait for the evaluation: it ends and cancels it.
            await never.passed()
        return float(draw.completion)

    run = await start(
        Script(play), rows=1, evaluation_dataset=HELD_OUT, on_any_rollout_failure="fail"
    )
    failure = await run.failure()
    assert failure.type == "RolloutFailed"
    assert f"the evaluation of version {broken} failed" in failure.message
    assert "no grader here" in failure.message
    (details,) = failure.details
    assert details.pop("first") in {
        f"run {run.id} · evaluation row {row}: RuntimeError: no grader here" for row in range(3)
    }
    assert details == {"version": broken, "evaluation": True, "failed": 3}
    assert run.trained == trained
