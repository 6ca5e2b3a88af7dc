"""A completion that ended in turn n continues in turn n, without sampling again."""

from pathlib import Path
from typing import Any

import pytest

from everburn import RecoverableRolloutError
from everburn.agentic import TraceIntegrityError
from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import GroupKey, RunRef
from everburn.records.keys import rollout_key
from everburn.records.store import ArtifactStore
from everburn.rollouts.evaluation import evaluate_shard, run_evaluation_function
from everburn.rollouts.failures import RowsFailedError
from everburn.rollouts.runner import RolloutRunner
from support.agents import a_run, complete, complete_elsewhere
from support.emulator import RunningEmulator


def sampled(emulator: RunningEmulator) -> int:
    """Completions that the emulator has finished."""
    return int(emulator.admin("GET", "state")["completions"].get("finished", 0))


def extras(folder: Path, how: str) -> dict[str, Any]:
    return {"notes": str(folder / "notes"), "accident": str(folder / "accident"), "how": how}


def check_rollout(run: RunRef) -> None:
    record, rollout = read_rollout(ArtifactStore.of(run), rollout_key(GroupKey(cursor=0), 0))
    assert record.info["turns"] == 4 and record.info["tool_calls"] == 4
    assert record.versions == [0, 0, 0, 0]
    (segment,) = rollout.segments
    assert sum(segment.loss_mask) == 4


async def test_a_completion_killed_in_its_third_turn_continues_there(
    emulator: RunningEmulator, tmp_path: Path
) -> None:
    async with a_run(tmp_path, emulator.base_url, extras=extras(tmp_path, "kill")) as run:
        before = sampled(emulator)
        killed = await complete_elsewhere(run)
        assert killed.returncode == -9, killed.stderr
        assert sampled(emulator) - before == 3

        outcome = await complete(run)
        assert (outcome.status, outcome.reused) == ("succeeded", True)
        assert sampled(emulator) - before == 4
        check_rollout(run)

    notes = [line.split()[1] for line in (tmp_path / "notes").read_text().splitlines()]
    assert notes == ["1", "2", "3", "1", "2", "3", "4"], "tools rebuild the environment's state"


async def test_a_completion_that_failed_in_its_third_turn_continues_there(
    emulator: RunningEmulator, tmp_path: Path
) -> None:
    async with a_run(tmp_path, emulator.base_url, extras=extras(tmp_path, "raise")) as run:
        before = sampled(emulator)
        with pytest.raises(RecoverableRolloutError, match="power"):
            await complete(run)
        await complete(run)
        assert sampled(emulator) - before == 4
        check_rollout(run)


async def test_a_rejected_trace_is_sampled_again(emulator: RunningEmulator, tmp_path: Path) -> None:
    async with a_run(tmp_path, emulator.base_url, extras=extras(tmp_path, "distrust")) as run:
        before = sampled(emulator)
        with pytest.raises(TraceIntegrityError):
            await complete(run)
        outcome = await complete(run)
        assert not outcome.reused
        assert sampled(emulator) - before == 3 + 4


async def test_an_evaluation_row_continues_where_it_failed_and_is_stored(
    emulator: RunningEmulator, tmp_path: Path
) -> None:
    async with a_run(tmp_path, emulator.base_url, extras=extras(tmp_path, "raise")) as run:
        before = sampled(emulator)
        with pytest.raises(RowsFailedError, match="power") as failure:
            await evaluate_shard(RolloutRunner(run), 0, 0, 0, 1)
        assert failure.value.failed == 1
        assert isinstance(failure.value.first, RecoverableRolloutError)
        await evaluate_shard(RolloutRunner(run), 0, 0, 0, 1, retry=1)
        assert sampled(emulator) - before == 4
        store = ArtifactStore.of(run)
        assert store.keys("evaluations/000000") == ["evaluations/000000/shard-0000.json"]

        await evaluate_shard(RolloutRunner(run), 0, 0, 0, 1, retry=2)
        assert sampled(emulator) - before == 4


async def test_an_evaluation_function_continues_where_it_failed_and_its_result_is_stored(
    emulator: RunningEmulator, tmp_path: Path
) -> None:
    fields = {"evaluation": "support.agents:mean_reward", "extras": extras(tmp_path, "raise")}
    async with a_run(tmp_path, emulator.base_url, **fields) as run:
        before = sampled(emulator)
        with pytest.raises(RecoverableRolloutError, match="power"):
            await run_evaluation_function(RolloutRunner(run), 0)
        for retry in (1, 2):
            figures = await run_evaluation_function(RolloutRunner(run), 0, retry)
            assert figures == {"reward": 1.0}
            assert sampled(emulator) - before == 8
        store = ArtifactStore.of(run)
        assert store.keys("evaluations/000000") == ["evaluations/000000/figures.json"]
