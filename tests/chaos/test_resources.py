"""kill -9 of the rollout worker: of what its completions had made, nothing is left."""

from pathlib import Path

from chaos.harness import Chaos
from everburn.resources import registered
from support.sandboxes import left, made_by


async def test_sandboxes_of_a_killed_worker_are_gone(chaos: Chaos, tmp_path: Path) -> None:
    chaos.plan("after append rollouts/row-000002.0/_calls-1.jsonl")
    run = await chaos.start(
        rollout="support.sandboxes:make_tiny_rollout_fn", extras={"sandboxes": str(tmp_path)}
    )
    await chaos.survived(run)
    assert len(set(made_by(tmp_path))) == 2, "sandboxes were made by the dead worker and by another"
    assert left(tmp_path) == (0, 0)
    assert registered(run.store) == []
