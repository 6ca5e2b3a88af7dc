"""A full disk is waited for longer than any failure is retried."""

from datetime import timedelta
from typing import Any

import pytest
from temporalio.common import RetryPolicy

from everburn.rollouts import attempt as rollout_attempt
from support.farm import Start
from support.full_disk import FullDisk
from support.script import Draw, Script
from workflows.children import retries
from workflows.run import train_run

TIMES = 10


async def play(draw: Draw) -> float:
    return float(draw.completion)


@pytest.mark.parametrize(
    "file",
    [
        "rows.jsonl",
        "rollouts/row-000000.0/completion-1.parquet",
        "groups/row-000000.0.json",
        "ledger/000001.json",
        "evaluations/000000/row-000001.json",
        "evaluations/000000/shard-0000.json",
        "evaluations/000000.json",
        "eval-after.json",
    ],
)
async def test_a_full_disk_is_waited_for(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch, file: str
):
    quick = RetryPolicy(maximum_attempts=2, initial_interval=timedelta(milliseconds=10))
    monkeypatch.setattr(train_run, "PREPARE_ATTEMPTS", quick)
    monkeypatch.setattr(train_run, "FULL_WAIT", timedelta(milliseconds=10))
    disk = FullDisk(file, TIMES)
    disk.install(monkeypatch)
    judged: list[int] = []

    def keep(group: Any) -> bool:
        judged.append(group.row["row"])
        return True

    run = await start_tuned(
        Script(play, keep=keep),
        rows=1,
        evaluation_dataset={"name": "support.tasks:rows", "kwargs": {"count": 2}},
        on_any_rollout_failure="fail",
    )
    result = await run.result()
    assert disk.refused == TIMES
    assert result.evaluations.keys() == {0, 1}
    assert run.trained == ["0"]
    assert len(run.script.begun) == 2 + 2 * 2, "nothing was done twice"
    assert judged == [0]


async def test_a_rollout_that_finds_no_space_in_time_does_not_count(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retries, "BACKOFF", (0.01,))
    monkeypatch.setattr(rollout_attempt, "STORE_PATIENCE", -1.0)
    disk = FullDisk("rollouts/row-000000.0/completion-1.parquet", TIMES)
    disk.install(monkeypatch)
    run = await start_tuned(
        Script(play), rows=1, rollout_timeout=1.0, on_any_rollout_failure="fail"
    )
    await run.result()
    assert disk.refused == TIMES
    assert run.trained == ["0"] and all(not group.lost for group in run.groups)
