"""Recoverable failures: retried within limits, then dropped, and counted by the breaker."""

import asyncio
import re

import pytest
from temporalio.api.sdk.v1 import WorkflowMetadata

from everburn import RecoverableRolloutError
from everburn.records.ids import GroupKey, group_workflow_id
from everburn.records.keys import rollout_key
from everburn.rollouts.failures import SnapshotGoneError
from everburn.usercode.entrypoints import EntrypointError
from support.farm import Farm, Start
from support.script import Draw, Script
from support.waiting import Gate, until
from workflows.children import retries
from workflows.children.retries import BACKOFF
from workflows.run import watchdog
from workflows.run.train_run import TrainRun


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "BACKOFF", (0.01,))


ASLEEP = "RecoverableRolloutError: the judge of row 0 is asleep"


async def fail(draw: Draw) -> float:
    raise RecoverableRolloutError(f"the judge of row {draw.row} is asleep")


async def test_a_recoverable_failure_is_retried_without_loss(start_tuned: Start):
    async def play(draw: Draw) -> float:
        if draw.retry < 2:
            raise ConnectionResetError("come back later")
        return draw.completion

    run = await start_tuned(Script(play), rows=1)
    await run.result()
    assert run.trained == ["0"]
    assert [len(run.script.draws(0, completion)) for completion in (0, 1)] == [3, 3]
    last = run.metrics("producer/event")[-1]
    assert last["producer/trajectory_drops_total"] == 0
    assert last["producer/recoverable_errors_total"] == 0


async def test_a_missing_snapshot_is_never_a_failure(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    """A recovery may take long: a missing snapshot is retried more often than any other failure."""
    monkeypatch.setattr(retries, "MAX_WORKER_FAILURES", 2)

    async def play(draw: Draw) -> float:
        if draw.retry < 4:
            raise SnapshotGoneError("policy version 0 isn't served")
        return draw.completion

    run = await start_tuned(Script(play), rows=1)
    await run.result()
    assert run.trained == ["0"]
    assert all(not group.lost for group in run.groups)
    last = run.metrics("producer/event")[-1]
    assert last["producer/trajectory_drops_total"] == 0
    assert last["producer/recoverable_errors_total"] == 0


async def test_an_attempt_on_an_unfit_worker_does_not_count(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    """The unfit worker is idle, takes what the busy ones can't, and returns it again and again."""
    monkeypatch.setattr(retries, "MAX_WORKER_FAILURES", 2)

    async def play(draw: Draw) -> float:
        if draw.retry < 4:
            raise EntrypointError("no module named 'my_task' on worker 17@there")
        return draw.completion

    run = await start_tuned(Script(play), rows=1, on_any_rollout_failure="fail")
    await run.result()
    assert run.trained == ["0"]
    assert all(not group.lost for group in run.groups)
    last = run.metrics("producer/event")[-1]
    assert last["producer/recoverable_errors_total"] == 0


async def test_attempts_on_unfit_workers_are_soon_retried(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    """With one fit worker, eight attempts in a row on unfit ones aren't rare: their pauses take
    seconds in total, not three minutes. If no worker has the code, the pauses still grow to a
    minute."""
    scale = 1000
    monkeypatch.setattr(retries, "BACKOFF", [seconds / scale for seconds in BACKOFF])

    async def play(draw: Draw) -> float:
        if draw.completion == 0 and draw.retry < 20:
            raise EntrypointError("no module named 'my_task' on worker 17@there")
        return draw.completion

    run = await start_tuned(Script(play), rows=1)
    await run.result()
    assert run.trained == ["0"]
    group = tunable_farm.client.get_workflow_handle(group_workflow_id(run.id, GroupKey(cursor=0)))
    waits = [
        event.timer_started_event_attributes.start_to_fire_timeout.ToTimedelta().total_seconds()
        for event in (await group.fetch_history()).events
        if b"waiting for a worker" in event.user_metadata.summary.data
    ]
    waits = [round(scale * wait) for wait in waits]
    assert (len(waits), sum(waits[:8]), max(waits)) == (20, 17, BACKOFF[-1])


async def test_a_group_says_that_it_waits_for_a_worker_with_its_code(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retries, "BACKOFF", (3600,))

    async def play(draw: Draw) -> float:
        raise EntrypointError("no module named 'my_task' on worker 17@there")

    run = await start_tuned(Script(play), rows=1)
    group = tunable_farm.client.get_workflow_handle(group_workflow_id(run.id, GroupKey(cursor=0)))

    async def says_so() -> bool:
        metadata: WorkflowMetadata = await group.query("__temporal_workflow_metadata")
        details = metadata.current_details
        return (
            "waiting for a worker that can import its code" in details
            and "no module named 'my_task' on worker 17@there" in details
        )

    await until(lambda: len(run.script.ended) == 2)
    await until(says_so)


async def test_a_completion_that_keeps_failing_is_dropped_and_counted(start_tuned: Start):
    async def play(draw: Draw) -> float:
        return await fail(draw) if draw.completion == 1 else draw.completion

    run = await start_tuned(Script(play), rows=1, completions_per_prompt=3)
    await run.result()
    assert len(run.script.draws(0, 1)) == 3
    (group,) = run.groups
    assert [member.completion for member in group.members] == [0, 2]
    (lost,) = group.lost
    assert (lost.completion, lost.status) == (1, "failed")
    assert "the judge of row 0 is asleep" in (lost.error or "")
    last = run.metrics("producer/event")[-1]
    assert last["producer/trajectory_drops_total"] == 1
    assert last["producer/recoverable_errors_total"] == 1


async def test_a_deadline_is_a_recoverable_failure(start_tuned: Start):
    async def play(draw: Draw) -> float:
        if draw.retry == 0:
            await asyncio.sleep(60)
        return draw.completion

    run = await start_tuned(Script(play), rows=1, rollout_timeout=1.0)
    await run.result()
    assert [draw.retry for draw in run.script.cancelled] == [0, 0]
    assert run.trained == ["0"]


async def test_five_failures_in_a_row_open_the_breaker(start_tuned: Start):
    async def play(draw: Draw) -> float:
        return await fail(draw) if draw.row == 1 else draw.completion

    run = await start_tuned(Script(play), rows=3, completions_per_prompt=5)
    failure = await run.failure()
    assert failure.type == "CircuitBreakerOpen"
    assert re.fullmatch(
        r"circuit breaker: 5 rollouts failed in a row; row 1 · completion \d: "
        "RecoverableRolloutError: the judge of row 1 is asleep",
        failure.message,
    )
    assert run.trained == ["0"]
    assert run.script.rows_begun == {0, 1}
    assert run.trainer.calls[-1] == "close"


async def test_half_of_the_last_rollouts_failing_opens_the_breaker(start_tuned: Start):
    async def play(draw: Draw) -> float:
        return await fail(draw) if draw.completion % 2 else draw.completion

    run = await start_tuned(
        Script(play), rows=5, completions_per_prompt=2, prompt_groups_per_step=5
    )
    failure = await run.failure()
    assert failure.type == "CircuitBreakerOpen"
    assert "5 of the last 10 rollouts failed; row " in failure.message
    assert " · completion 1: RecoverableRolloutError: the judge of row " in failure.message


async def test_any_failure_ends_the_run_if_configured(start_tuned: Start):
    async def play(draw: Draw) -> float:
        return await fail(draw) if draw.completion == 1 else draw.completion

    run = await start_tuned(Script(play), rows=1, on_any_rollout_failure="fail")
    failure = await run.failure()
    assert failure.type == "RolloutFailed"
    assert "row 0 · completion 1 failed" in failure.message
    assert "the judge of row 0 is asleep" in failure.message
    (details,) = failure.details
    assert (details["version"], details["evaluation"], details["failed"]) == (0, False, 1)
    assert details["first"].endswith("row 0 · completion 1: " + ASLEEP)


async def test_if_any_failure_ends_the_run_all_of_its_phase_are_counted(
    start_tuned: Start,
):
    """This includes failures of other rows, later failures and fatal errors."""
    others = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 0:
            return await fail(draw) if draw.completion == 0 else draw.completion
        await others.passed()
        if draw.row == 1:
            raise KeyError("tool")
        return draw.completion

    run = await start_tuned(
        Script(play),
        rows=3,
        prompt_groups_per_step=3,
        collect_full_batch=True,
        on_any_rollout_failure="fail",
    )
    await run.until(phase="failing")
    others.open()
    failure = await run.failure()
    assert failure.type == "RolloutFailed"
    (details,) = failure.details
    assert (details["version"], details["evaluation"], details["failed"]) == (0, False, 3)
    assert details["first"].endswith("row 0 · completion 0: " + ASLEEP)
    assert len(run.script.ended) == 8 and run.trained == []


async def test_without_a_trainer_only_rollouts_that_have_ended_are_counted(
    start_tuned: Start, tunable_farm: Farm, monkeypatch: pytest.MonkeyPatch
):
    """Rollouts in flight wait for their snapshot, which no recovery publishes again."""
    monkeypatch.setattr(watchdog, "INTERVAL", 0.2)

    async def play(draw: Draw) -> float:
        if draw.row == 0:
            return await fail(draw)
        raise SnapshotGoneError("policy version 0 isn't served")

    run = await start_tuned(
        Script(play), rows=2, max_head_offpolicy_versions=1, on_any_rollout_failure="fail"
    )
    await run.until(phase="failing")
    lease = tunable_farm.client.get_workflow_handle(f"{run.id}/lease-1")
    await lease.terminate("lost")
    failure = await run.failure()
    assert failure.type == "RolloutFailed"
    (details,) = failure.details
    assert details["failed"] == 2
    assert run.trainer.count("open") == 1


async def test_a_fatal_rollout_reports_its_phase_too(start_tuned: Start):
    async def play(draw: Draw) -> float:
        if draw.version == 1:
            raise KeyError("tool")
        return draw.completion

    run = await start_tuned(Script(play), rows=2, on_any_rollout_failure="fail")
    failure = await run.failure()
    assert failure.type == "KeyError"
    (details,) = failure.details
    assert "KeyError: 'tool'" in details["first"]
    assert (details["version"], details["failed"]) == (1, 2)


async def test_a_held_run_continues_once_the_cause_is_fixed(start_tuned: Start):
    """Finished completions of the row aren't sampled again."""
    fixed = False
    sibling = Gate()

    async def play(draw: Draw) -> float:
        if draw.place == (1, 1) and not fixed:
            await sibling.passed()
            raise KeyError("tool")
        return draw.completion

    run = await start_tuned(Script(play), rows=3, on_fatal="hold")
    stored = rollout_key(GroupKey(cursor=1), 0)
    await until(lambda: run.store.exists(stored))
    sibling.open()
    status = await run.until(phase="held")
    assert "KeyError: 'tool'" in (status.error or "")
    fixed = True
    assert await run.handle.execute_update(TrainRun.resume) == "resumed"
    result = await run.result()
    assert (result.rows, run.trained) == (3, ["0", "1.1", "2"])
    assert sorted(draw.completion for draw in run.script.draws(1)) == [0, 1, 1]


async def test_a_held_run_can_skip_the_row(start_tuned: Start):
    async def play(draw: Draw) -> float:
        if draw.row == 1:
            raise KeyError("tool")
        return draw.completion

    run = await start_tuned(Script(play), rows=3, on_fatal="hold")
    await run.until(phase="held")
    assert await run.handle.execute_update(TrainRun.skip_row) == "skipped row 1"
    result = await run.result()
    assert (result.rows, run.trained) == (3, ["0", "2"])
    # A resumed run must not start the row again.
    assert [g.key.cursor for g in run.groups if g.rejected] == [1]
    assert [c.text for entry in run.ledger for c in entry.commands] == ["skip_row 1"]
