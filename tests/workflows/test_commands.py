"""Commands to a running run: pause, reconfigure, checkpoint, each by update."""

import asyncio
import contextlib
import threading
from functools import partial

import pandas
import pytest
from temporalio.client import (
    WorkflowFailureError,
    WorkflowUpdateFailedError,
    WorkflowUpdateStage,
)
from temporalio.exceptions import ApplicationError, CancelledError

from activities import records
from everburn.records.commands import Command, ending_of, read_commands
from everburn.records.ledger import LedgerEntry, StepCommit
from everburn.records.store import ArtifactStore
from everburn.trainers.protocol import TrainerRejectedError
from support.farm import Run, Start
from support.script import Draw, Script, behind, spread
from support.waiting import Gate, until
from workflows.run.train_run import TrainRun


async def test_a_paused_run_finishes_its_rollouts_and_admits_no_row(start: Start):
    run = await start(Script(), rows=3)
    optimizer = run.trainer.hold("optim_step")
    await run.trainer.reached("optim_step")
    assert await run.handle.execute_update(TrainRun.pause) == "paused"
    optimizer.open()
    await run.until(step=1)
    assert run.script.rows_begun == {0}
    assert await refusal(run, TrainRun.pause) == "the run is paused already"

    assert await run.handle.execute_update(TrainRun.resume) == "resumed"
    result = await run.result()
    assert (result.rows, run.trained) == (3, ["0", "1", "2"])


async def test_a_paused_run_can_be_stopped(start: Start):
    run = await start(Script(), rows=2)
    publish = run.trainer.hold("publish policy-0001")
    await run.trainer.reached("publish policy-0001")
    await run.handle.execute_update(TrainRun.pause)
    publish.open()
    await run.until(step=1)
    await run.handle.signal(TrainRun.stop)
    result = await run.result()
    assert (result.stopped, result.rows) == (True, 1)


async def test_changes_apply_from_the_next_step_and_are_part_of_the_ledger(start: Start):
    run = await start(Script(), rows=2, learning_rate=0.5)
    optimizer = run.trainer.hold("publish policy-0001")
    await run.trainer.reached("publish policy-0001")
    answer = await run.handle.execute_update(
        TrainRun.reconfigure, {"learning_rate": 0.25, "evaluation_interval": 7}
    )
    assert answer == "changed evaluation_interval, learning_rate"
    text = await refusal(run, TrainRun.reconfigure, {"learning_rate": -1})
    assert "learning_rate" in text
    assert "completions_per_prompt" in await refusal(
        run, TrainRun.reconfigure, {"completions_per_prompt": 4}
    )
    optimizer.open()
    await run.result()
    assert [adam.learning_rate for adam in run.trainer.adam] == [0.5, 0.25]
    assert [entry.changes for entry in run.ledger if entry.changes] == [
        {"learning_rate": 0.25, "evaluation_interval": 7}
    ]
    (command,) = [each for entry in run.ledger for each in entry.commands]
    assert command.text == "reconfigure evaluation_interval, learning_rate"


async def test_changes_apply_to_the_batch_that_is_being_collected(start: Start):
    gate = Gate()
    run = await start(Script(behind({1: gate})), rows=2, learning_rate=0.5)
    await run.until(step=1, groups_in_flight=1)
    await run.handle.execute_update(TrainRun.reconfigure, {"learning_rate": 0.25})
    gate.open()
    await run.result()
    assert [adam.learning_rate for adam in run.trainer.adam] == [0.5, 0.25]


async def test_every_command_is_kept(start: Start):
    """This includes many commands, and commands that no step follows."""
    gates = [Gate() for _ in range(3)]
    gates[0].open()

    async def play(draw: Draw) -> float:
        await gates[draw.row].passed()
        return await spread(draw)

    run = await start(Script(play), rows=3, dcp_save_interval=0)
    await run.until(step=1, groups_in_flight=1)
    for _ in range(6):
        await run.handle.execute_update(TrainRun.pause)
        await run.handle.execute_update(TrainRun.resume)
    saved = await run.handle.execute_update(TrainRun.checkpoint)
    gates[1].open()
    await run.until(step=2, groups_in_flight=1)
    await run.handle.signal(TrainRun.stop)
    result = await run.result()

    kept = read_commands(run.store)
    said = [*["pause", "resume"] * 6, "checkpoint", "stop"]
    assert [command.text for command in kept[:14]] == said
    assert [command.number for command in kept] == list(range(len(kept)))
    assert [command.step for command in kept[:13]] == [1] * 13
    assert run.ledger[1].commands == kept[:13]
    assert kept[12].checkpoint == saved
    saves = [command for command in kept if command.text == "final checkpoint"]
    assert [command.checkpoint for command in saves] == [result.checkpoint]
    assert kept[-1].ending == "stopped"
    table = pandas.DataFrame([command.model_dump() for command in kept])
    assert list(table["text"]) == [command.text for command in kept]


async def test_a_command_during_a_commit_belongs_to_the_next_step(
    start_tuned: Start, monkeypatch: pytest.MonkeyPatch
):
    gate, committing = threading.Event(), threading.Event()
    commit = records.commit_step

    def stand_still(step: StepCommit) -> LedgerEntry:
        if step.step == 1:
            committing.set()
            assert gate.wait(30)
        return commit(step)

    monkeypatch.setattr(records, "commit_step", stand_still)
    run = await start_tuned(Script(), rows=2, learning_rate=0.5)
    await until(committing.is_set)
    update = await run.handle.start_update(
        TrainRun.reconfigure,
        {"learning_rate": 0.25},
        wait_for_stage=WorkflowUpdateStage.ACCEPTED,
    )
    gate.set()
    await update.result()
    await run.result()
    assert [entry.changes for entry in run.ledger] == [{}, {"learning_rate": 0.25}]
    assert [adam.learning_rate for adam in run.trainer.adam] == [0.5, 0.25]


@pytest.mark.parametrize("how", ["completed", "failed", "cancelled"])
async def test_a_run_records_how_it_ended(start: Start, how: str):
    async def play(draw: Draw) -> float:
        if how == "failed" and draw.row == 1:
            raise KeyError("tool")
        if how == "cancelled" and draw.row == 1:
            await asyncio.sleep(60)
        return await spread(draw)

    run = await start(Script(play), rows=2)
    if how == "cancelled":
        await run.until(step=1, groups_in_flight=1)
        await run.handle.cancel()
    with contextlib.suppress(WorkflowFailureError):
        await run.result()
    last = read_commands(run.store)[-1]
    assert last.ending == how
    assert ("tool" in last.text) == (how == "failed")


async def test_a_run_cancelled_while_it_writes_a_command_records_how_it_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    """The cleanup doesn't reuse the number of a command that may already be written."""
    written, cancelled = threading.Event(), threading.Event()
    record = records.record_command

    def stand_still(store: ArtifactStore, command: Command) -> None:
        record(store, command)
        if command.text == "final checkpoint":
            written.set()
            assert cancelled.wait(30)

    monkeypatch.setattr(records, "record_command", stand_still)
    run = await start(Script(), rows=1)
    await until(written.is_set)
    await run.handle.cancel()
    with pytest.raises(WorkflowFailureError) as failure:
        await run.result()
    assert isinstance(failure.value.cause, CancelledError)
    cancelled.set()
    assert [command.text for command in read_commands(run.store)] == [
        "final checkpoint",
        "cancelled",
    ]
    assert ending_of(run.store) == "cancelled"


async def test_a_wider_window_is_used_at_once(start: Start):
    gate = Gate()

    async def play(draw: Draw) -> float:
        await gate.passed()
        return await spread(draw)

    run = await start(Script(play), rows=3)
    await until(lambda: run.script.rows_begun == {0})
    await run.handle.execute_update(TrainRun.reconfigure, {"max_head_offpolicy_versions": 2})
    await until(lambda: run.script.rows_begun == {0, 1, 2})
    gate.open()
    await run.result()


async def test_a_checkpoint_is_saved_on_request(start: Start):
    gate = Gate()
    run = await start(Script(behind({1: gate})), rows=2)
    await run.until(step=1, groups_in_flight=1)
    answer: object = await run.handle.execute_update(TrainRun.checkpoint)
    assert answer == "scripted/state-1"
    assert run.trainer.calls[-1] == "save_checkpoint state-1"
    gate.open()
    await run.result()
    # The time of the save is in the record of the saved step.
    assert [record["checkpoint/wall_time"] >= 0 for record in run.metrics()] == [True, True]


async def test_a_requested_checkpoint_is_timed_even_if_no_step_follows(start: Start):
    gate = Gate()
    run = await start(Script(behind({1: gate})), rows=2)
    await run.until(step=1, groups_in_flight=1)
    await run.handle.execute_update(TrainRun.checkpoint)
    await run.handle.signal(TrainRun.stop)
    gate.open()
    result = await run.result()
    assert result.steps == 1 and run.trainer.count("save_checkpoint state-1") == 1
    (record,) = run.metrics()
    assert record["checkpoint/wall_time"] >= 0


async def test_a_failed_checkpoint_request_is_not_answered_with_an_older_one(start: Start):
    gate = Gate()
    script = Script(behind({1: gate}))
    script.trainer.fail_once("save_checkpoint state-1", TrainerRejectedError("the disk is full"))
    run = await start(script, rows=2)
    await run.until(step=1, groups_in_flight=1)
    assert "the disk is full" in await refusal(run, TrainRun.checkpoint)
    # The failed attempt may have used the name.
    answer: object = await run.handle.execute_update(TrainRun.checkpoint)
    assert answer == "scripted/state-1-try-2"
    gate.open()
    result = await run.result()
    assert result.rows == 2


async def test_a_checkpoint_request_during_a_cancellation_is_answered(start: Start):
    gate = Gate()
    script = Script(behind({1: gate}))
    saving = script.trainer.hold("save_checkpoint state-1")
    run = await start(script, rows=2)
    await run.until(step=1, groups_in_flight=1)
    asked = asyncio.create_task(refusal(run, TrainRun.checkpoint))
    await run.trainer.reached("save_checkpoint state-1")
    await run.handle.cancel()
    assert "it was cancelled, or has failed, and saves nothing any more" in await asked
    saving.open()
    with pytest.raises(WorkflowFailureError):
        await run.result()


async def test_a_run_that_is_neither_paused_nor_held_has_nothing_to_resume(start: Start):
    run = await start(Script(), rows=1)
    optimizer = run.trainer.hold("optim_step")
    await run.trainer.reached("optim_step")
    assert await refusal(run, TrainRun.resume) == "the run is neither paused nor held"
    assert "isn't held" in await refusal(run, TrainRun.skip_row)
    optimizer.open()
    await run.result()


async def test_a_held_run_saves_no_checkpoint_and_says_why(start: Start):
    """This holds for a request during the hold and for one that has waited since before."""
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 1:
            await gate.passed()
            raise RuntimeError("no such tool")
        return await spread(draw)

    script = Script(play)
    optimizer = script.trainer.hold("optim_step")
    run = await start(script, rows=2, max_head_offpolicy_versions=1, on_fatal="hold")
    await run.trainer.reached("optim_step")
    asked = asyncio.create_task(refusal(run, TrainRun.checkpoint))
    await until(lambda: updates(run, 1))
    gate.open()
    await until(partial(has_failed, run))
    optimizer.open()
    assert "no such tool" in await asked
    await run.until(phase="held")
    answer = await refusal(run, TrainRun.checkpoint)
    assert "no such tool" in answer and "resume, skip_row or stop it first" in answer
    await run.handle.execute_update(TrainRun.skip_row)
    await run.result()


async def test_a_run_that_fails_is_not_resumed(start: Start):
    """It doesn't retry the failed row either while it counts other failures."""
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 0:
            raise KeyError("tool")
        await gate.passed()
        return await spread(draw)

    run = await start(
        Script(play), rows=3, max_head_offpolicy_versions=1, on_any_rollout_failure="fail"
    )
    await run.until(phase="failing")
    for update in (TrainRun.resume, TrainRun.skip_row, TrainRun.checkpoint):
        answer = await refusal(run, update)
        assert answer.startswith("the run fails: ") and "KeyError: 'tool'" in answer
    gate.open()
    failure = await run.failure()
    assert failure.type == "KeyError"
    assert len(run.script.draws(0)) == 2


async def test_a_held_run_can_be_ended_as_failed(start: Start):
    async def play(draw: Draw) -> float:
        raise KeyError("tool")

    run = await start(Script(play), rows=1, on_fatal="hold")
    await run.until(phase="held")
    await run.handle.execute_update(TrainRun.reconfigure, {"on_fatal": "fail"})
    assert (await run.failure()).type == "KeyError"


async def test_a_run_that_is_ending_accepts_no_changes(start: Start):
    script = Script()
    saving = script.trainer.hold("save_checkpoint state-1")
    run = await start(script, rows=1)
    await run.trainer.reached("save_checkpoint state-1")
    for update, *arguments in (
        [TrainRun.pause],
        [TrainRun.checkpoint],
        [TrainRun.reconfigure, {"save_final_checkpoint": False}],
    ):
        assert "the run is ending" in await refusal(run, update, *arguments)
    saving.open()
    await run.result()
    assert [command.text for command in read_commands(run.store)][-1:] == ["completed"]


async def has_failed(run: Run) -> bool:
    return (await run.status()).error is not None


async def updates(run: Run, count: int) -> bool:
    """Whether the run has accepted this number of commands."""
    history = await run.handle.fetch_history()
    kinds = [event.WhichOneof("attributes") for event in history.events]
    return kinds.count("workflow_execution_update_accepted_event_attributes") >= count


async def refusal(run: Run, update: object, *args: object) -> str:
    """The reason for which an update is refused."""
    with pytest.raises(WorkflowUpdateFailedError) as failure:
        await run.handle.execute_update(update, *args)  # type: ignore[call-overload]
    assert isinstance(failure.value.cause, ApplicationError)
    return failure.value.cause.message
