"""User code that hangs, blocks, crashes or exits, and a worker that can't import it."""

import os

import pytest
from temporalio.client import WorkflowFailureError

from chaos.harness import PATIENCE, Chaos, Run, process_command
from chaos.tasks import PLACE
from support.waiting import until
from workers.exits import BLOCKED
from workflows.children.retries import MAX_FAILURES, MAX_WORKER_FAILURES

TASK = "chaos.tasks"


def begun(run: Run) -> int:
    """How often the completion with the mischief reached its sampling call."""
    return sum(e.event == "begun" and e.place == PLACE for e in run.executions)


async def test_a_completion_that_kills_its_process_once_is_retried(chaos: Chaos) -> None:
    run = await chaos.start(task=TASK, extras={"mischief": "crash"})
    await chaos.survived(run)
    assert begun(run) == 1


@pytest.mark.chaos
async def test_a_completion_that_always_kills_its_process_is_given_up(chaos: Chaos) -> None:
    """A completion can't kill workers forever: in the end it counts as failed. Each of the ten
    deaths takes a heartbeat timeout to be noticed."""
    run = await chaos.start(
        task=TASK, rows=4, min_group_size=4, extras={"mischief": "crash", "always": True}
    )
    await chaos.survived(run, steps=2, patience=600)
    assert len(chaos.deaths) >= MAX_WORKER_FAILURES


@pytest.mark.chaos
async def test_a_rollout_that_never_returns_is_dropped_at_its_deadline(chaos: Chaos) -> None:
    run = await chaos.start(
        task=TASK, rollout_timeout=3.0, extras={"mischief": "hang", "always": True}
    )
    await chaos.survived(run)
    assert begun(run) == 0
    lost = [(m.key.cursor, [o.completion for o in m.lost]) for m in run.groups if m.lost]
    assert lost == [(2, [1])]


@pytest.mark.chaos
async def test_a_rollout_that_hangs_once_is_retried_and_trained(chaos: Chaos) -> None:
    run = await chaos.start(task=TASK, rollout_timeout=3.0, extras={"mischief": "hang"})
    await chaos.survived(run)
    assert all(not manifest.lost for manifest in run.groups)


@pytest.mark.chaos
async def test_code_that_blocks_keeps_its_activity(chaos: Chaos) -> None:
    """The code blocks longer than the heartbeat timeout: heartbeats come from another thread."""
    run = await chaos.start(task=TASK, extras={"mischief": "block"})
    await chaos.survived(run)
    assert begun(run) == 1
    assert run.ledger[-1].metrics.get("recovery/rollouts_reused", 0) == 0


@pytest.mark.chaos
async def test_a_worker_blocked_forever_names_the_code_and_ends(chaos: Chaos) -> None:
    run = await chaos.start(task=TASK, rollout_timeout=3.0, extras={"mischief": "block for ever"})
    await chaos.survived(run)
    assert all(not manifest.lost for manifest in run.groups)
    assert [death.name for death in chaos.deaths] == ["rollout"]
    said = chaos.stack.processes.log("rollout").read_text()
    assert "in block_for_ever" in said and f"exit code {BLOCKED}" in said


@pytest.mark.chaos
async def test_a_completion_that_always_blocks_its_worker_is_given_up(chaos: Chaos) -> None:
    """The other completions of the worker, which it ends each time, are not given up."""
    run = await chaos.start(
        task=TASK,
        rows=4,
        rollout_timeout=3.0,
        extras={"mischief": "block for ever", "always": True},
    )
    await chaos.survived(run, steps=2, patience=600)
    lost = [(m.key.cursor, [o.completion for o in m.lost]) for m in run.groups if m.lost]
    assert lost == [(2, [1])]
    assert len(chaos.deaths) == MAX_FAILURES


@pytest.mark.chaos
async def test_an_error_in_a_thread_of_user_code_has_no_effect_on_the_run(chaos: Chaos) -> None:
    run = await chaos.start(task=TASK, extras={"mischief": "thread"})
    await chaos.survived(run)


@pytest.mark.chaos
async def test_a_completion_that_fails_once_is_retried(chaos: Chaos) -> None:
    run = await chaos.start(task=TASK, extras={"mischief": "fail"})
    await chaos.survived(run)
    assert all(not manifest.lost for manifest in run.groups)


@pytest.mark.chaos
async def test_code_that_exits_is_a_fatal_error_that_can_be_fixed(chaos: Chaos) -> None:
    deaths = len(chaos.stack.processes.deaths)
    run = await chaos.start(task=TASK, on_fatal="hold", extras={"mischief": "exit"})
    held = await run.until(phase="held")
    assert "row 2 · completion 1" in str(held.error)
    assert "SystemExit" in str(held.error)
    await run.handle.execute_update("resume")
    await chaos.survived(run, again={PLACE[0]})
    assert len(chaos.stack.processes.deaths) == deaths, "the worker kept running"


@pytest.mark.chaos
async def test_a_loss_function_that_blocks_forever_delays_no_other_run(chaos: Chaos) -> None:
    """Both runs train on one trainer worker, with one thread for all requests of the SDK."""
    marker = chaos.folder / "blocked"
    kwargs = {"mischief": "block for ever", "marker": str(marker)}
    blocked = await chaos.start(loss={"name": f"{TASK}:loss", "kwargs": kwargs})
    await until(marker.exists, lambda: "for the loss to be called", PATIENCE)
    other = await chaos.start(task=TASK)
    assert (await other.result()).steps == 4
    status = await blocked.status()
    assert (status.step, status.lease_epoch, status.recovered) == (0, 1, None)
    await blocked.handle.terminate("its loss won't return")
    await chaos.survived(other)
    assert not chaos.deaths


@pytest.mark.chaos
async def test_a_loss_function_that_exits_ends_its_run_and_no_other(chaos: Chaos) -> None:
    kwargs = {"mischief": "exit"}
    run = await chaos.start(loss={"name": f"{TASK}:loss", "kwargs": kwargs})
    with pytest.raises(WorkflowFailureError) as failure:
        await run.result()
    assert f"loss {TASK}:loss: SystemExit: user code has had enough" in str(failure.value.cause)
    await chaos.survived(await chaos.start(task=TASK))
    assert not chaos.deaths


@pytest.mark.chaos
async def test_a_worker_without_the_users_module_leaves_its_work_to_others(chaos: Chaos) -> None:
    held_out = {"name": "system.tiny_task:rows", "kwargs": {"count": 3}}
    slow = [0, 1, 2, 3, 4, 5, 6, 7]
    run = await chaos.start(
        task=TASK, extras={"late": slow}, evaluation_dataset=held_out, evaluation_interval=2
    )
    await run.until_rows()
    paths = os.pathsep.join(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)
    command = process_command("worker", "rollout", "--address", chaos.stack.address)
    unfit = ["env", f"PYTHONPATH={paths}", *command]
    # Without the tests' folder it can import neither the task nor its named points.
    unfit[unfit.index("chaos.process")] = "workers.cli.app"
    chaos.stack.processes.start("unfit", unfit)
    try:
        await chaos.survived(run)
    finally:
        chaos.stack.processes.stop("unfit")
    assert "chaos" in chaos.stack.processes.log("unfit").read_text()
    result = await run.result()
    assert all("eval/reward" in metrics for metrics in result.evaluations.values())
