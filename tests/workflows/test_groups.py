"""Outcomes of a prompt group: retries, drops, rejection, and errors that end the run."""

import os
import threading
from typing import Any

import pytest

from activities import records, rollouts
from everburn import RolloutRun, RolloutSample
from everburn.records.ledger import LedgerEntry, StepCommit
from support import tasks
from support.farm import Start
from support.script import Draw, Script, behind, one_segment
from support.waiting import Gate, until


async def test_a_filtered_row_is_rejected_and_counts_only_in_raw_metrics(start: Start):
    async def play(draw: Draw) -> float:
        return draw.row + draw.completion

    seen = []

    def keep(group) -> bool:
        seen.append((group.row, group.rewards, group.version))
        return bool(max(group.rewards) < 3)

    run = await start(
        Script(play, keep=keep), rows=4, prompt_groups_per_step=2, max_head_offpolicy_versions=1
    )
    result = await run.result()
    assert ({"row": 2}, [2.0, 3.0], 0) in seen
    assert [group.outcome for group in run.groups] == [
        "accepted",
        "accepted",
        "filtered",
        "filtered",
    ]
    assert (result.steps, result.rows, run.trained) == (1, 4, ["0", "1"])
    last = run.metrics("producer/event")[-1]
    assert last["producer/filter_drops_total"] == last["producer/rows_rejected_total"] == 2


async def test_raw_metrics_cover_all_completions_and_filtered_ones_the_kept(start: Start):
    """Row 0 is rejected before the step of rows 1 and 2."""
    rejected = Gate()

    async def play(draw: Draw) -> float:
        if draw.row:
            await rejected.passed()
        return draw.row + draw.completion

    script = Script(play, keep=lambda group: group.row["row"] != 0)
    run = await start(script, rows=3, prompt_groups_per_step=2, max_head_offpolicy_versions=1)
    await run.until(rows_resolved=1)
    rejected.open()
    await run.result()
    (step,) = run.metrics()
    assert (step["rollout/raw_samples"], step["rollout/filtered_samples"]) == (6, 4)
    assert step["rollout/raw_reward"] == (0 + 1 + 1 + 2 + 2 + 3) / 6
    assert step["rollout/filtered_reward"] == (1 + 2 + 2 + 3) / 4
    assert step["rollout/filter_ratio"] == pytest.approx(1 / 3)


async def test_a_row_rejected_while_a_step_is_committed_counts_in_the_next(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    committing, rejected = threading.Event(), threading.Event()
    commit = records.commit_step

    def stand_still(step: StepCommit) -> LedgerEntry:
        if step.step == 1:
            committing.set()
            assert rejected.wait(30)
        return commit(step)

    monkeypatch.setattr(records, "commit_step", stand_still)
    gates = {1: Gate(), 2: Gate()}
    script = Script(behind(gates), keep=lambda group: group.row["row"] != 1)
    run = await start(script, rows=3, max_head_offpolicy_versions=2)
    await until(committing.is_set)
    gates[1].open()
    await run.until(rows_resolved=1)
    rejected.set()
    gates[2].open()
    await run.result()
    samples = [(m["rollout/raw_samples"], m["rollout/filtered_samples"]) for m in run.metrics()]
    assert samples == [(2, 2), (4, 2)]


async def test_a_rollout_that_returns_none_is_dropped_and_the_others_train(start: Start):
    async def play(draw: Draw) -> float | None:
        return None if draw.completion == 0 else draw.completion

    run = await start(Script(play), rows=4, completions_per_prompt=3, prompt_groups_per_step=4)
    await run.result()
    assert [len(group.members) for group in run.groups] == [2, 2, 2, 2]
    assert all([o.status for o in group.lost] == ["dropped"] for group in run.groups)
    assert run.metrics()[0]["rollout/raw_samples"] == 8
    last = run.metrics("producer/event")[-1]
    assert last["producer/trajectory_drops_total"] == 4
    assert last["producer/recoverable_errors_total"] == 0


async def test_drops_never_open_the_circuit_breaker(start: Start):
    async def play(draw: Draw) -> None:
        return None

    run = await start(Script(play), rows=4, completions_per_prompt=4, prompt_groups_per_step=4)
    result = await run.result()
    assert (result.steps, result.rows) == (0, 4)
    assert [group.outcome for group in run.groups] == ["incomplete"] * 4


async def test_an_incomplete_group_is_retried_within_its_limit_then_rejected(start: Start):
    async def play(draw: Draw) -> float | None:
        return None if draw.row == 1 and draw.completion == 0 else draw.completion

    run = await start(
        Script(play),
        rows=2,
        prompt_groups_per_step=2,
        min_group_size=2,
        max_incomplete_group_retries=2,
    )
    result = await run.result()
    outcomes = {group.key.text: group.outcome for group in run.groups}
    assert outcomes == {
        "0": "accepted",
        "1": "incomplete",
        "1.1": "incomplete",
        "1.2": "incomplete",
    }
    assert (run.trained, result.rows) == (["0"], 2)
    assert len(run.script.draws(row=1)) == 6  # all completions of the group, each time
    last = run.metrics("producer/event")[-1]
    assert last["producer/incomplete_group_retries_total"] == 2
    assert last["producer/rows_submitted_total"] == 2


async def test_a_retried_group_is_trained_once_enough_completions_succeed(start: Start):
    async def play(draw: Draw) -> float | None:
        return None if draw.retry == 0 and draw.completion == 0 else draw.completion

    run = await start(Script(play), rows=1, min_group_size=2, max_incomplete_group_retries=1)
    await run.result()
    assert run.trained == ["0.1"]


async def test_an_invalid_rollout_ends_the_run_and_is_named(start: Start):
    """The run ends at once: a blocked sibling is cancelled, and nothing is trained."""
    never = Gate()

    async def play(draw: Draw) -> float | RolloutRun:
        if draw.place == (0, 1):
            good = one_segment(1.0).segments[0]
            bad = RolloutSample([1, 2], [0.0], [0, 1], 1.0)
            return RolloutRun([good, bad])
        await never.passed()
        return 0.0

    run = await start(Script(play), rows=2, prompt_groups_per_step=2)
    failure = await run.failure()
    assert failure.type == "InvalidRolloutError"
    assert failure.message.startswith(f"run {run.id} · row 0 · completion 1 · segment 1: ")
    assert "tokens, logprobs and loss_mask must be equally long, got 2, 1 and 2" in failure.message
    assert run.trainer.count("forward_backward") == 0
    assert run.trainer.calls[-1] == "close"
    status = await run.status()
    assert status.error == failure.message
    assert status.groups_in_flight == 0


async def test_an_unknown_exception_ends_the_run_before_its_batch_is_trained(start: Start):
    ready = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 1:
            await ready.passed()
            raise KeyError("tool")
        return draw.completion

    run = await start(Script(play), rows=2, prompt_groups_per_step=2)
    await run.trainer.reached("forward_backward")
    ready.open()
    failure = await run.failure()
    assert failure.type == "KeyError"
    assert f"run {run.id} · row 1 · completion " in failure.message
    assert "KeyError: 'tool'" in failure.message
    assert run.trainer.count("optim_step") == 0
    assert (run.ledger, run.trainer.calls[-1]) == ([], "close")


async def test_a_fatal_error_after_the_batch_is_sealed_lets_the_step_finish(start: Start):
    broken = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 1:
            await broken.passed()
            raise KeyError("tool")
        return draw.completion

    run = await start(Script(play), rows=3, max_head_offpolicy_versions=1)
    optimizer = run.trainer.hold("optim_step")
    await run.trainer.reached("optim_step")
    broken.open()
    await until(lambda: len(run.script.ended) == 4)
    await run.until(groups_in_flight=0)
    optimizer.open()
    failure = await run.failure()
    assert failure.type == "KeyError"
    assert run.trained == ["0"]
    assert run.trainer.calls[-2:] == ["publish policy-0001-e1", "close"]
    assert run.script.rows_begun == {0, 1}


@pytest.mark.parametrize("error", [ZeroDivisionError("no rewards"), SystemExit("no rewards")])
async def test_a_filter_that_fails_ends_the_run_and_is_named(start: Start, error: BaseException):
    def keep(group) -> bool:
        raise error

    run = await start(Script(keep=keep), rows=1)
    failure = await run.failure()
    assert failure.type == type(error).__name__
    assert "support.tasks:keep" in failure.message and "row 0" in failure.message


@pytest.mark.parametrize(
    ("where", "fields"),
    [
        ("support.tasks:keep", {}),
        ("advantages", {"advantages": {"name": "support.tasks:never_returns"}}),
    ],
)
async def test_a_group_function_that_never_returns_ends_the_run_and_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch, where: str, fields: dict[str, Any]
):
    monkeypatch.setattr(rollouts, "JUDGE_TIMEOUT", 0.5)
    tasks.ended.clear()
    keep = None if fields else lambda group: tasks.ended.wait()
    run = await start(Script(keep=keep), rows=1, **fields)
    failure = await run.failure()
    tasks.ended.set()
    assert failure.type == "TimeoutError"
    assert f"row 0 · {where}: TimeoutError: it hasn't returned within 0.5 s" in failure.message


async def test_slow_filters_delay_no_other_group(start: Start):
    """More filters run at once than a worker's shared pool has threads."""
    ended = threading.Event()
    waiting: list[int] = []

    def wait(group) -> bool:
        waiting.append(group.row["row"])
        return ended.wait()

    rows = min(32, (os.cpu_count() or 1) + 4) + 1
    slow = await start(Script(keep=wait), rows=rows, prompt_groups_per_step=rows)
    try:
        await until(lambda: len(waiting) == rows, lambda: waiting)
        other = await start(Script(), rows=1)
        assert (await other.result()).steps == 1
    finally:
        ended.set()
    assert (await slow.result()).steps == 1
