"""Long runs continue as new between steps without effect on rows, children, leases and messages."""

from typing import Any

import pytest
from temporalio.client import WorkflowUpdateStage

from support.farm import Farm, Run, Start
from support.histories import run_histories
from support.script import Draw, Script, spread
from support.waiting import Gate, until
from workflows.run import train_run
from workflows.run.train_run import TrainRun


@pytest.fixture(autouse=True)
def continue_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_run, "MAX_HISTORY", 1)


async def test_every_row_is_trained_once_across_executions(start_tuned: Start, tunable_farm: Farm):
    evaluated = []

    def evaluate(step: int, rollout_fn: Any) -> dict[str, float]:
        evaluated.append(step)
        return {"skill": step}

    run = await start_tuned(
        Script(evaluate=evaluate),
        rows=7,
        prompt_groups_per_step=2,
        max_head_offpolicy_versions=1,
        max_concurrency_rollout_sample=4,
        dcp_save_interval=2,
    )
    result = await run.result()
    assert (result.steps, result.version, result.rows) == (4, 4, 7)
    assert sorted(run.trained) == [str(row) for row in range(7)]
    assert [entry.step for entry in run.ledger] == [1, 2, 3, 4]
    assert [entry.checkpoint is not None for entry in run.ledger] == [False, True, False, True]
    assert len(run.script.begun) == 14
    assert evaluated == [0, 1, 2, 3, 4]
    assert result.evaluations.keys() == {0, 4}
    assert run.trainer.count("open") == run.trainer.count("close") == 1
    assert await executions(tunable_farm, run) == 5
    assert [record["rollout/step"] for record in run.metrics()] == [0, 1, 2, 3, 4]
    events = [record["producer/event"] for record in run.metrics("producer/event")]
    assert events == list(range(len(events)))


async def test_a_group_reports_to_the_next_execution_of_its_run(
    start_tuned: Start, tunable_farm: Farm
):
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 2:
            await gate.passed()
        return await spread(draw)

    run = await start_tuned(
        Script(play), rows=3, prompt_groups_per_step=1, max_head_offpolicy_versions=2
    )
    await run.until(step=2)
    await until(lambda: executions_are(tunable_farm, run, 3))
    status = await run.status()
    assert (status.groups_in_flight, status.samples_in_flight, status.rows_resolved) == (1, 2, 2)
    gate.open()
    result = await run.result()
    assert (result.rows, sorted(run.trained)) == (3, ["0", "1", "2"])
    assert len(run.script.begun) == 6


async def test_a_stop_and_a_failure_reach_a_continued_run(start_tuned: Start):
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 1:
            await gate.passed()
            raise KeyError("tool")
        return await spread(draw)

    run = await start_tuned(Script(play), rows=3)
    await run.until(step=1)
    gate.open()
    failure = await run.failure()
    assert failure.type == "KeyError"
    assert run.trainer.calls[-1] == "close"

    run = await start_tuned(Script(play=Stuck(1).play), rows=3)
    await run.until(step=1, groups_in_flight=1)
    await run.handle.signal(TrainRun.stop)
    result = await run.result()
    assert (result.stopped, result.rows, result.checkpoint) == (True, 1, "scripted/state-1")


async def test_a_requested_checkpoint_is_saved_before_continue_as_new(start_tuned: Start):
    run = await start_tuned(Script(), rows=3)
    publish = run.trainer.hold("publish policy-0001")
    await run.trainer.reached("publish policy-0001")
    asked = await run.handle.start_update(
        TrainRun.checkpoint, wait_for_stage=WorkflowUpdateStage.ACCEPTED
    )
    publish.open()
    answer: object = await asked.result()
    assert answer == "scripted/state-1"
    result = await run.result()
    assert result.rows == 3


class Stuck:
    """A script in which rollouts of one row never end."""

    def __init__(self, row: int) -> None:
        self._row = row

    async def play(self, draw: Draw) -> float:
        if draw.row == self._row:
            await Gate().passed()
        return await spread(draw)


async def executions(farm: Farm, run: Run) -> int:
    """The number of executions of the run."""
    assert run.handle.first_execution_run_id is not None
    histories = await run_histories(farm.client, run.id, run.handle.first_execution_run_id)
    return sum(history.workflow_id == run.id for history in histories)


async def executions_are(farm: Farm, run: Run, count: int) -> bool:
    return await executions(farm, run) == count
