"""A step whose batch takes long to collect continues in later executions, without any effect."""

from pathlib import Path

import pytest

from everburn.trainers.protocol import TrainerStateLostError
from support.farm import Farm, Run, Start
from support.histories import run_histories
from support.script import Script
from workflows.run import batch

ROWS = 12
KEPT = ("0", "11")
"""The batch: its first group is sent long before its last one is complete."""


@pytest.fixture(autouse=True)
def short_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "LONG_STEP", 60)


def picky() -> Script:
    return Script(keep=lambda group: str(group.row["row"]) in KEPT)


async def start_picky(start_tuned: Start, script: Script) -> Run:
    """A script that finishes one row after the other."""
    return await start_tuned(
        script, rows=ROWS, prompt_groups_per_step=2, max_concurrency_rollout_sample=2
    )


async def test_a_group_is_not_submitted_again_after_continue_as_new(
    start_tuned: Start, tunable_farm: Farm
):
    run = await start_picky(start_tuned, picky())
    result = await run.result()
    assert (result.steps, run.trained) == (1, list(KEPT))
    assert len(run.script.begun) == 2 * ROWS
    assert run.trainer.calls == [
        "open",
        "save_checkpoint state-0",
        "publish policy-0000-e1",
        "forward_backward 2",
        "forward_backward 2",
        "optim_step",
        "publish policy-0001-e1",
        "save_checkpoint state-1",
        "close",
    ]
    (entry,) = run.ledger
    assert sent(run) == [["row-000000.0"], ["row-000011.0"]]
    assert entry.attempts == 1
    (step,) = [record for record in run.metrics() if record["rollout/step"] == 1]
    assert step["rollout/raw_samples"] == 2 * ROWS
    assert 0 < step["perf/train_time"] <= step["perf/train_time"] + step["perf/train_wait_time"]

    histories = await run_histories(tunable_farm.client, run.id, run.first_execution)
    own = [history for history in histories if history.workflow_id == run.id]
    assert len(own) >= 3
    assert max(len(history.events) for history in own) < 160


async def test_a_lease_failure_submits_again_what_earlier_executions_sent(start_tuned: Start):
    script = picky()
    script.trainer.fail_once("optim_step", TrainerStateLostError("the service restarted"))
    run = await start_picky(start_tuned, script)
    await run.result()
    (entry,) = run.ledger
    assert (entry.lease_epoch, run.trained) == (2, list(KEPT))
    assert [group for part in sent(run) for group in part] == ["row-000000.0", "row-000011.0"]
    assert len(run.script.begun) == 2 * ROWS


def sent(run: Run) -> list[list[str]]:
    """The groups of each submission of the first step."""
    manifests = [run.store.get_json(each.key) for each in run.ledger[0].submissions]
    return [[Path(group["key"]).stem for group in each["groups"]] for each in manifests]
