"""Held-out rows: a failed row is named, and no row fails of an error that training tolerates."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from everburn import RecoverableRolloutError, RolloutRun
from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import GroupKey
from everburn.records.keys import evaluation_key, rollout_key
from everburn.records.store import StoreError
from everburn.rollouts.evaluation import complete_evaluation, evaluate_shard, load_report
from everburn.rollouts.failures import RowsFailedError
from everburn.rollouts.runner import RolloutRunner
from support.script import Draw, one_segment
from support.scripted_run import scripted_run


async def test_a_rollout_reports_the_same_fields_in_training_and_evaluation(
    tmp_path: Path,
) -> None:
    async def play(draw: Draw) -> RolloutRun:
        return RolloutRun(one_segment(1.0).segments, info={"score": float("nan"), "at": tmp_path})

    run = scripted_run(tmp_path, play)
    runner = RolloutRunner(run)
    await runner.complete(GroupKey(cursor=0), 0, version=0)
    record, _ = read_rollout(runner.store, rollout_key(GroupKey(cursor=0), 0))
    await evaluate_shard(runner, 0, 0, 0, 1)
    complete_evaluation(run, 0, 1, 1.0, {}, None)
    report = load_report(runner.store, evaluation_key(0))
    assert report is not None
    assert report.samples[0].info == record.info == {"score": "NaN", "at": str(tmp_path)}


async def test_a_store_failure_is_not_a_failure_of_a_row(tmp_path: Path) -> None:
    async def play(draw: Draw) -> Any:
        if draw.row == 0:
            raise StoreError("can't write its sandbox's record")
        if draw.row == 1:
            raise RecoverableRolloutError("the judge is asleep")
        return 1.0

    runner = RolloutRunner(scripted_run(tmp_path, play, count=3))
    with pytest.raises(RowsFailedError) as caught:
        await evaluate_shard(runner, 0, 0, 0, 3)
    assert isinstance(caught.value.first, RecoverableRolloutError) and caught.value.failed == 1


@pytest.mark.parametrize("count_all", [False, True])
async def test_a_fatal_failure_is_reported_before_others_with_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count_all: bool
) -> None:
    failed = asyncio.Event()

    async def play(draw: Draw) -> Any:
        if draw.row == 0:
            raise RecoverableRolloutError("the judge is asleep")
        await failed.wait()
        if draw.row == 2:
            raise KeyError("answer")
        return 1.0

    fields = {"on_any_rollout_failure": "fail"} if count_all else {}
    runner = RolloutRunner(scripted_run(tmp_path, play, count=3, **fields))
    evaluate = runner.evaluate

    async def report_its_end(index: int, version: int, retry: int) -> Any:
        try:
            return await evaluate(index, version, retry)
        finally:
            if index == 0:  # its cleanup takes a moment
                failed.set()

    monkeypatch.setattr(runner, "evaluate", report_its_end)
    with pytest.raises(RowsFailedError) as caught:
        await evaluate_shard(runner, 0, 0, 0, 3)
    assert isinstance(caught.value.first, KeyError)
    assert caught.value.where == "run scripted · evaluation row 2"
    assert caught.value.failed == 2
