"""Evaluations under the failure policy: which failures count, and which rows are repeated."""

import asyncio
from datetime import timedelta

import pytest
from temporalio import activity

from activities import heartbeats
from everburn import RecoverableRolloutError
from everburn.records.commands import ending_of
from everburn.rollouts.failures import SnapshotGoneError
from support.farm import Run, Start
from support.script import Draw, Script
from support.waiting import Gate, until
from workflows.children import evaluation, retries

HELD_OUT = {"name": "support.tasks:rows", "kwargs": {"count": 3}}


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "BACKOFF", (0.01,))


def evaluated(run: Run, version: int = 0) -> list[int]:
    """How often each held-out row was started for a version."""
    draws = [draw for draw in run.script.begun if draw.evaluation and draw.version == version]
    return [sum(draw.row == row for draw in draws) for row in range(3)]


async def test_only_the_failed_row_of_an_evaluation_is_repeated(
    start_tuned: Start,
):
    failed = Gate()
    at_once: list[int] = []
    beside: list[int] = []

    async def play(draw: Draw) -> float:
        if not draw.evaluation or draw.version:
            return float(draw.completion)
        at_once.append(draw.row)
        beside.append(at_once.count(draw.row))
        try:
            if draw.row == 0 and draw.retry < 2:
                failed.open()
                raise RecoverableRolloutError("the judge is asleep")
            await failed.passed()
            return 1.0
        finally:
            at_once.remove(draw.row)

    run = await start_tuned(
        Script(play), rows=1, evaluation_dataset=HELD_OUT, on_any_rollout_failure="fail"
    )
    result = await run.result()
    assert evaluated(run) == [3, 1, 1]
    assert set(beside) == {1}
    assert result.evaluations[0]["eval/reward"] == 1.0
    assert run.store.keys("evaluations/000000") == ["evaluations/000000/shard-0000.json"]


async def test_a_row_that_keeps_failing_fails_its_evaluation(start_tuned: Start):
    async def play(draw: Draw) -> float:
        if draw.evaluation and (draw.row, draw.version) == (1, 0):
            raise RecoverableRolloutError("the judge is asleep")
        return float(draw.completion)

    run = await start_tuned(Script(play), rows=1, evaluation_dataset=HELD_OUT)
    await run.result()
    assert evaluated(run) == [1, 3, 1]
    (note,) = (await run.status()).notes
    assert note.startswith("evaluation of version 0: ") and "the judge is asleep" in note


async def test_a_final_evaluation_that_fails_during_the_final_save_ends_the_run(
    start_tuned: Start,
):
    """The evaluation ends while the run waits for the final save, not for the evaluation."""
    saved = Gate()

    async def evaluate(step: int, rollout_fn: object) -> dict[str, float]:
        if step == 1:
            await saved.passed()
            raise KeyError("grader")
        return {"skill": 1.0}

    script = Script(evaluate=evaluate)
    saving = script.trainer.hold("save_checkpoint state-1")
    run = await start_tuned(script, rows=1, on_any_rollout_failure="fail")
    await run.trainer.reached("save_checkpoint state-1")
    saved.open()

    async def has_failed() -> bool:
        return (await run.status()).error is not None

    await until(has_failed)
    saving.open()
    failure = await run.failure()
    assert failure.type == "RolloutFailed" and "KeyError: 'grader'" in failure.message
    assert ending_of(run.store) == "failed"
    assert run.trainer.finished[-1] == "save_checkpoint state-1"


async def test_a_fatal_error_ends_the_other_rows_at_once(start_tuned: Start):
    begun, never = Gate(), Gate()

    async def play(draw: Draw) -> float:
        if not draw.evaluation or draw.version:
            return float(draw.completion)
        if draw.row == 2:
            begun.open()
        if draw.row == 0:
            await begun.passed()
            raise KeyError("grader")
        await never.passed()
        return 0.0

    run = await start_tuned(Script(play), rows=1, evaluation_dataset=HELD_OUT)
    await run.result()
    assert evaluated(run) == [1, 1, 1]
    assert {draw.row for draw in run.script.cancelled} == {1, 2}
    (note,) = (await run.status()).notes
    assert "KeyError: 'grader'" in note


async def test_a_missing_snapshot_is_never_an_evaluations_failure(start_tuned: Start):
    async def play(draw: Draw) -> float:
        if draw.evaluation and draw.row == 1 and draw.retry < 5:
            raise SnapshotGoneError("policy version 0 isn't served")
        return float(draw.completion)

    run = await start_tuned(
        Script(play), rows=1, evaluation_dataset=HELD_OUT, on_any_rollout_failure="fail"
    )
    await run.result()
    assert evaluated(run) == [1, 6, 1]


async def test_an_evaluation_survives_repeated_worker_failures(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    """Worker failures exceed the limit for other failures, and finished rows aren't repeated."""
    monkeypatch.setattr(evaluation, "HEARTBEAT_TIMEOUT", timedelta(seconds=1))
    beat = heartbeats._beat
    silent: list[str] = []

    async def beat_unless_dead(interval: timedelta) -> None:
        if activity.info().activity_type == "evaluate_shard" and len(silent) < 4:
            silent.append(activity.info().activity_id)
            await asyncio.Event().wait()
        await beat(interval)

    never = Gate()

    async def play(draw: Draw) -> float:
        if draw.evaluation and draw.row == 2 and draw.retry < 4:
            await never.passed()
        return float(draw.completion)

    monkeypatch.setattr(heartbeats, "_beat", beat_unless_dead)
    run = await start_tuned(
        Script(play), rows=1, evaluation_dataset=HELD_OUT, on_any_rollout_failure="fail"
    )
    await run.result()
    assert evaluated(run) == [1, 1, 5]


async def test_an_evaluation_function_is_retried_after_a_recoverable_failure(
    start_tuned: Start,
):
    called: list[int] = []

    def evaluate(step: int, rollout_fn: object) -> dict[str, float]:
        called.append(step)
        if called.count(0) < 3:
            raise ConnectionResetError("the judge is asleep")
        return {"skill": 1.0}

    run = await start_tuned(Script(evaluate=evaluate), rows=1)
    result = await run.result()
    assert called == [0, 0, 0, 1]
    assert result.evaluations[0]["eval/skill"] == 1.0


async def test_an_evaluation_that_finds_no_worker_says_what_it_waited_for(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retries, "BACKOFF", (3600,))

    async def play(draw: Draw) -> float:
        if draw.evaluation and draw.version == 0:
            raise SnapshotGoneError("policy version 0 isn't served")
        return float(draw.completion)

    run = await start_tuned(
        Script(play), rows=1, evaluation_dataset=HELD_OUT, evaluation_timeout=2.0
    )
    await run.result()
    (note,) = (await run.status()).notes
    assert "not finished within evaluation_timeout (2 s): rows 0-2: waiting for its policy" in note
    await until(lambda: evaluated(run) == [1, 1, 1])
