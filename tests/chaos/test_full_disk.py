"""A run waits while the disk is full: no work is repeated and nothing is lost."""

import pytest

from chaos.harness import Chaos

MORE_THAN_ATTEMPTS = 10
"""How often there is no space: more often than any failure is retried."""
CALLS = "before append rollouts/row-000002.0/_calls-1.jsonl"
"""The record of a sampling call isn't waited for, since without it the call would only be repeated:
each of a completion's two is tried once."""
WRITES = [
    "before put rollouts/row-000003.0/completion-1.parquet",
    "before put groups/row-000003.0.json",
    CALLS,
    "before put steps/000002/*",
    "before put publications/*/000002.json",
    "before put publications/*/current.json",
    "before put checkpoints/state-0/*",
    "before put checkpoints/state-2/*",
    "before put ledger/000002.json",
    "before append metrics.jsonl",
    "before put config.json",
    "before put rows.jsonl",
    "before put evaluations/000002/row-000001.json",
    "before put evaluations/000002/shard-0000.json",
    "before put evaluations/000002.json",
]


@pytest.mark.chaos
@pytest.mark.parametrize("write", WRITES)
async def test_a_full_disk_is_waited_for(chaos: Chaos, write: str) -> None:
    held_out = {"name": "system.tiny_task:rows", "kwargs": {"count": 3}}
    chaos.plan(write, "full", times=2 if write == CALLS else MORE_THAN_ATTEMPTS)
    run = await chaos.start(evaluation_dataset=held_out, evaluation_interval=2)
    await chaos.survived(run)
    assert {entry.lease_epoch for entry in run.ledger} == {1}
    assert len(run.executions) == 2 * 8 * 4, "each completion was executed once"
    result = await run.result()
    assert all("eval/reward" in metrics for metrics in result.evaluations.values())
    assert all(not manifest.lost for manifest in run.groups)
