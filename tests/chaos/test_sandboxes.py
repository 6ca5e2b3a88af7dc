"""kill -9 of the rollout worker: all sandboxes of its completions are reaped."""

import shutil
from pathlib import Path

import pytest

from chaos.harness import Chaos
from everburn.rollouts.sandboxes import sandbox_keys
from support.command_line import ROOT
from support.sandboxes import inside, left, made_by


async def test_sandboxes_of_a_killed_worker_are_gone(chaos: Chaos, tmp_path: Path) -> None:
    chaos.plan("after append rollouts/row-000002.0/_calls-1.jsonl")
    run = await chaos.start(
        rollout="support.sandboxes:make_tiny_rollout_fn", extras={"sandboxes": str(tmp_path)}
    )
    await chaos.survived(run)
    assert len(set(made_by(tmp_path))) == 2, "sandboxes were made by the dead worker and by another"
    assert left(tmp_path) == (0, 0)
    assert sandbox_keys(run.store) == []


@pytest.mark.chaos
async def test_hud_environments_of_a_killed_worker_are_gone(chaos: Chaos, tmp_path: Path) -> None:
    """Each environment is a process in its own session, which outlives its worker."""
    pytest.importorskip("hud", reason="needs the extra: pip install 'everburn[hud]'")
    shutil.copytree(ROOT / "tests/hud/counting", tmp_path / "counting")
    chaos.plan("after append rollouts/row-000001.0/_calls-1.jsonl")
    run = await chaos.start(
        rows=4,
        rollout="support.hud_processes:make_rollout_fn",
        extras={"environment": str(tmp_path / "counting" / "env.py")},
    )
    await chaos.survived(run, steps=2)
    assert len(set(made_by(tmp_path / "counting"))) == 2, "of the dead worker and of another"
    assert list(inside(tmp_path / "counting")) == []
    assert sandbox_keys(run.store) == []
