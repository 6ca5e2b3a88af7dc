"""Checkpoints and adapters that a run starts from, and checkpoints that it saves."""

from everburn.records.checkpoints import find_checkpoint
from everburn.trainers.protocol import TrainerRejectedError, TrainerStateLostError
from support.farm import Start
from support.script import Script

ELSEWHERE = "acme/run-" + "0123456789abcdef" * 2 + "/state-7"


async def test_another_runs_checkpoint_is_loaded_before_anything_is_saved(start: Start):
    run = await start(Script(), rows=2, init_from_checkpoint=ELSEWHERE)
    result = await run.result()
    assert run.trainer.calls[:4] == [
        "open",
        f"load_checkpoint {ELSEWHERE}",
        "save_checkpoint state-0",
        "publish policy-0000-e1",
    ]
    # Weights and optimizer are the other run's; steps and rows start from zero.
    assert (result.steps, run.trained) == (2, ["0", "1"])


async def test_a_lease_failure_before_the_first_save_loads_the_origin_again(start: Start):
    script = Script()
    script.trainer.fail_once("save_checkpoint state-0", TrainerStateLostError("gone"))
    run = await start(script, rows=1, init_from_checkpoint="cross_job://job-1/step-4")
    await run.result()
    assert run.trainer.count("load_checkpoint cross_job://job-1/step-4") == 2


async def test_a_checkpoint_that_the_trainer_refuses_ends_the_run(start: Start):
    script = Script()
    script.trainer.refuse(
        "load_checkpoint", TrainerRejectedError("checkpoint x holds no optimizer state")
    )
    run = await start(script, rows=1, init_from_checkpoint=ELSEWHERE)
    failure = await run.failure()
    assert failure.type == "OriginRefused"
    assert "init_from_checkpoint can't be used" in failure.message
    assert "holds no optimizer state" in failure.message
    assert run.trainer.count("save_checkpoint") == 0
    assert run.script.begun == []


async def test_a_bare_name_in_a_new_run_is_refused_before_anything_is_opened(start: Start):
    run = await start(Script(), rows=1, init_from_checkpoint="state-4")
    failure = await run.failure()
    assert failure.type == "InvalidConfig"
    assert "everburn resume RUN --set init_from_checkpoint=state-4" in failure.message
    assert run.trainer.calls == []


async def test_an_adapter_is_loaded_with_a_fresh_optimizer(start: Start):
    adapter = "accounts/acme/models/warm"
    run = await start(Script(), rows=1, lora_rank=4, warm_start_from_adapter=adapter)
    await run.result()
    assert run.trainer.calls[1:3] == [f"load_adapter {adapter}", "save_checkpoint state-0"]


async def test_every_checkpoint_is_shown_with_its_full_path_and_recorded(start: Start):
    run = await start(Script(), rows=3, dcp_save_interval=2)
    await run.result()
    status = await run.status()
    assert status.saved == [
        "step 0: scripted/state-0",
        "step 2: scripted/state-2",
        "step 3: scripted/state-3",
    ]
    assert run.ledger[1].checkpoint == "scripted/state-2"
    final = find_checkpoint(run.store, 3)
    assert final is not None and final.path == "scripted/state-3"


async def test_a_refused_final_checkpoint_is_retried_under_another_name(start: Start):
    script = Script()
    script.trainer.fail_once("save_checkpoint state-1", TrainerRejectedError("the disk is full"))
    run = await start(script, rows=1)
    result = await run.result()
    assert result.checkpoint == "scripted/state-1-try-2"


async def test_a_final_checkpoint_that_cannot_be_saved_fails_the_run(start: Start):
    script = Script()
    script.trainer.refuse("save_checkpoint state-1", TrainerRejectedError("the disk is full"))
    run = await start(script, rows=1)
    failure = await run.failure()
    assert failure.type == "CheckpointFailed"
    assert "the disk is full" in failure.message and "everburn resume" in failure.message
    assert [entry.step for entry in run.ledger] == [1]
