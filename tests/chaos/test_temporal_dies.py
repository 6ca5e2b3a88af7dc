"""kill -9 of the Temporal server, also while a worker is between two writes."""

import pytest

from chaos.harness import Chaos

MOMENTS = [
    ("trainer", "after optim_step"),
    ("trainer", "after put publications/*/000001.json"),
    ("trainer", "after save_checkpoint state-2"),
    ("orchestrator", "before put ledger/000002.json"),
    ("orchestrator", "after put ledger/000002.json"),
    ("rollout", "after put rollouts/row-000003.0/completion-1.parquet"),
    ("rollout", "after put groups/row-000003.0.json"),
    ("rollout", "after put evaluations/000002/shard-0000.json"),
]
HELD_OUT = {"name": "system.tiny_task:rows", "kwargs": {"count": 3}}


async def test_the_server_dies_while_rollouts_run(chaos: Chaos) -> None:
    run = await chaos.start()
    await run.until_step(1)
    chaos.stack.processes.kill("temporal")
    await chaos.survived(run)


@pytest.mark.chaos
@pytest.mark.parametrize(("role", "point"), MOMENTS)
async def test_the_server_dies_between_a_write_and_its_report(
    chaos: Chaos, role: str, point: str
) -> None:
    moment = chaos.plan(point, "freeze")
    run = await chaos.start(evaluation_dataset=HELD_OUT, evaluation_interval=2)
    assert await chaos.frozen(moment) == role
    chaos.stack.processes.kill("temporal")
    chaos.stack.processes.thaw(role)
    await chaos.survived(run)
