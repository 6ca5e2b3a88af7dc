"""kill -9 of the rollout worker at its writes, with other completions in flight."""

import pytest

from chaos.harness import Chaos, Run

HELD_OUT = {"name": "system.tiny_task:rows", "kwargs": {"count": 3}}


def begun(run: Run, row: int, completion: int) -> int:
    place = (row, completion)
    return sum(e.event == "begun" and e.place == place for e in run.executions)


async def test_a_written_completion_is_not_executed_again(chaos: Chaos) -> None:
    """The worker dies between the write of a rollout and the report of it."""
    chaos.plan("after put rollouts/row-000003.0/completion-1.parquet")
    run = await chaos.start()
    await chaos.survived(run)
    assert begun(run, 3, 1) == 1


@pytest.mark.chaos
async def test_an_unwritten_completion_is_executed_again(chaos: Chaos) -> None:
    chaos.plan("before put rollouts/row-000003.0/completion-1.parquet")
    run = await chaos.start()
    await chaos.survived(run)
    assert begun(run, 3, 1) == 2


@pytest.mark.chaos
async def test_a_completion_killed_in_its_second_turn_costs_one_turn(chaos: Chaos) -> None:
    """Its first sampling call was recorded, as were those of the other completions in flight."""
    chaos.plan("after append rollouts/row-000002.0/_calls-1.jsonl")
    run = await chaos.start()
    await chaos.survived(run)
    assert begun(run, 2, 1) == 2
    reused = [entry.metrics.get("recovery/rollouts_reused", 0) for entry in run.ledger]
    assert reused[-1] >= 1


@pytest.mark.chaos
@pytest.mark.parametrize(
    "point",
    [
        "after put rows.jsonl",
        "before append rollouts/row-000002.0/_calls-1.jsonl",
        "before put groups/row-000003.0.json",
        "after put groups/row-000003.0.json",
    ],
)
async def test_the_rollout_worker_dies(chaos: Chaos, point: str) -> None:
    chaos.plan(point)
    run = await chaos.start()
    await chaos.survived(run)
    assert {entry.lease_epoch for entry in run.ledger} == {1}


@pytest.mark.chaos
@pytest.mark.parametrize(
    "point",
    [
        "before put evaluations/000002/shard-0000.json",
        "after put evaluations/000002/shard-0000.json",
        "before put evaluations/000002.json",
        "after put evaluations/000002.json",
    ],
)
async def test_the_rollout_worker_dies_during_an_evaluation(chaos: Chaos, point: str) -> None:
    chaos.plan(point)
    run = await chaos.start(evaluation_dataset=HELD_OUT, evaluation_interval=2)
    await chaos.survived(run)
    result = await run.result()
    assert all("eval/reward" in metrics for metrics in result.evaluations.values())
    # Every evaluation that was due has its report.
    for version in (0, 2, 4):
        assert run.store.exists(f"evaluations/{version:06d}.json")


@pytest.mark.chaos
async def test_the_rollout_worker_dies_again_and_again(chaos: Chaos) -> None:
    for row in range(0, 8, 2):
        chaos.plan(f"before put rollouts/row-{row:06d}.0/completion-0.parquet")
    run = await chaos.start()
    await chaos.survived(run)
