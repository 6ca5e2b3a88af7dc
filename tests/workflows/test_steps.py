"""Optimizer steps: when groups are submitted, one update and one publication for each batch."""

from everburn.records.publications import find_publication
from everburn.trainers.protocol import TrainerRejectedError
from support.farm import Start
from support.script import Draw, Script
from support.waiting import Gate, until

STEP_METRICS = {
    "rollout/step",
    "rollout/raw_reward",
    "rollout/filtered_reward",
    "rollout/raw_samples",
    "rollout/filtered_samples",
    "rollout/filter_ratio",
    "rollout/reward_std_within_group",
    "rollout/kept_groups",
    "rollout/datums",
    "rollout/updated",
    "train/loss",
    "train/publication_gap",
    "train/grad_norm",
    "train/lr",
    "train/tokens",
    "train/ppo_kl",
    "train/clip_frac",
    "train/ratio_mean",
    "async/version_offset_mean",
    "async/version_offset_max",
    "async/in_flight_samples_mean",
    "async/admission_capacity_samples_mean",
    "async/staleness_capacity_samples_mean",
    "async/submissions",
    "perf/step_time",
    "perf/train_time",
    "perf/train_wait_time",
    "perf/wait_time_ratio",
    "perf/weight_update_time",
    "perf/step_samples_per_s",
    "perf/step_tokens_per_s",
}
PRODUCER_METRICS = {
    "producer/event",
    "producer/elapsed_time_s",
    "producer/no_progress_s",
    "producer/published_version",
    "producer/in_flight_samples",
    "producer/admission_capacity_samples",
    "producer/staleness_capacity_samples",
    "producer/rows_submitted_total",
    "producer/rows_accepted_total",
    "producer/rows_rejected_total",
    "producer/completion_refill_attempts_total",
    "producer/completion_refill_rows_submitted_total",
    "producer/trajectory_drops_total",
    "producer/recoverable_errors_total",
    "producer/filter_drops_total",
    "producer/incomplete_group_retries_total",
    "producer/breaker_consecutive_failures",
    "producer/breaker_tripped",
}


async def test_a_run_trains_every_row_once_and_leaves_its_record(start: Start):
    run = await start(Script(), rows=4, prompt_groups_per_step=2)
    result = await run.result()

    assert (result.steps, result.version, result.rows) == (2, 2, 4)
    assert (result.stopped, result.checkpoint) == (False, "scripted/state-2")
    assert [entry.step for entry in run.ledger] == [1, 2]
    assert run.trained == ["0", "1", "2", "3"]
    assert all(entry.updated and entry.lease_epoch == 1 for entry in run.ledger)
    assert [group.outcome for group in run.groups] == ["accepted"] * 4
    status = await run.status()
    assert (status.phase, status.step, status.rows_resolved) == ("completed", 2, 4)
    assert (status.groups_in_flight, status.samples_in_flight) == (0, 0)
    assert run.store.get_json("config.json")["completions_per_prompt"] == 2
    assert run.trainer.calls[:3] == [
        "open",
        "save_checkpoint state-0",
        "publish policy-0000-e1",
    ]
    assert run.trainer.calls[-2:] == ["save_checkpoint state-2", "close"]


async def test_metrics_have_one_record_per_step_and_a_stream_of_the_producer(start: Start):
    run = await start(Script(), rows=2)
    await run.result()

    steps, producer = run.metrics(), run.metrics("producer/event")
    assert [record["rollout/step"] for record in steps] == [1, 2]
    assert steps[0].keys() == STEP_METRICS
    assert steps[1].keys() == STEP_METRICS | {"checkpoint/wall_time"}  # the final checkpoint
    assert [record["producer/event"] for record in producer] == list(range(len(producer)))
    assert all(record.keys() == PRODUCER_METRICS for record in producer)
    assert steps[0]["rollout/raw_reward"] == 0.5
    assert steps[0]["train/tokens"] == 4  # two trained tokens per completion
    last = producer[-1]
    assert last["producer/rows_submitted_total"] == last["producer/rows_accepted_total"] == 2
    assert last["producer/published_version"] == 2


async def test_groups_are_submitted_when_ready_and_may_be_pending_together(start: Start):
    gates = [Gate() for _ in range(3)]

    async def play(draw: Draw) -> float:
        await gates[draw.row].passed()
        return draw.completion

    run = await start(Script(play), rows=3, prompt_groups_per_step=3)
    backward = run.trainer.hold("forward_backward")
    for count, gate in enumerate(gates, start=1):
        gate.open()
        await run.trainer.reached("forward_backward", count)
    assert run.trainer.finished.count("forward_backward 2") == 0
    assert run.trainer.count("optim_step") == 0

    backward.open()
    await run.result()
    assert run.trainer.calls[3:8] == ["forward_backward 2"] * 3 + [
        "optim_step",
        "publish policy-0001-e1",
    ]
    assert run.metrics()[0]["async/submissions"] == 3


async def test_what_the_trainer_reports_of_several_requests_is_combined(start: Start):
    """Each number has its own reduction; and payloads keep to their budget for any number of
    requests."""
    gates = [Gate(), Gate()]

    async def play(draw: Draw) -> float:
        await gates[draw.row].passed()
        return draw.completion

    script = Script(play)
    many = {f"number_{n}_of_a_trainer_that_has_much_to_tell:sum": 0.1234567 for n in range(100)}
    script.trainer.reports = [
        many | {"kl:mean": 1.0, "r:max": 2.0, "r:min": 0.5, "n:sum": 3.0, "x:odd": 1.0, "y:sum": 1},
        many | {"kl:mean": 4.0, "r:max": 1.5, "r:min": 0.25, "n:sum": 4.0, "x:odd": 2.0},
    ]
    run = await start(script, rows=2, prompt_groups_per_step=2)
    for count, gate in enumerate(gates, start=1):
        gate.open()
        await run.trainer.reached("forward_backward", count)
    await run.result()

    (step,) = run.metrics()
    assert step["async/submissions"] == 2
    reported = {name: value for name, value in step.items() if name.startswith("trainer/")}
    assert len(reported) == 104
    assert {name: value for name, value in reported.items() if "number" not in name} == {
        "trainer/kl_mean": 2.5,
        "trainer/r_max": 2.0,
        "trainer/r_min": 0.25,
        "trainer/n_sum": 7.0,
    }
    assert run.ledger[0].metrics.items() >= reported.items()


async def test_groups_ready_during_a_step_share_the_next_submission(start: Start):
    """Nothing of step 2 is submitted before step 1 is committed: gradients would mix."""
    run = await start(Script(), rows=4, prompt_groups_per_step=2, max_head_offpolicy_versions=1)
    publish = run.trainer.hold("publish policy-0001")
    await run.trainer.reached("publish policy-0001")
    submitted = run.trainer.count("forward_backward")
    await until(lambda: len(run.groups) == 4)
    await run.until(groups_in_flight=0)
    assert run.trainer.count("forward_backward") == submitted
    assert run.ledger == []

    publish.open()
    await run.result()
    assert run.trainer.calls[-5:] == [
        "forward_backward 4",
        "optim_step",
        "publish policy-0002-e1",
        "save_checkpoint state-2",
        "close",
    ]
    assert [entry.metrics["async/version_offset_max"] for entry in run.ledger] == [0, 1]


async def test_collect_full_batch_submits_nothing_before_the_batch_is_full(start: Start):
    gate = Gate()

    async def play(draw: Draw) -> float:
        if draw.row == 2:
            await gate.passed()
        return draw.completion

    run = await start(Script(play), rows=3, prompt_groups_per_step=3, collect_full_batch=True)
    await run.until(groups_ready=2)
    assert run.trainer.count("forward_backward") == 0
    gate.open()
    await run.result()
    assert run.trainer.count("forward_backward 6") == run.trainer.count("forward_backward") == 1


async def test_a_step_without_signal_publishes_the_old_snapshot_again(start: Start):
    async def play(draw: Draw) -> float:
        return draw.completion if draw.row == 1 else 1.0

    run = await start(Script(play), rows=2)
    result = await run.result()

    assert (result.steps, result.version) == (2, 2)
    assert [entry.updated for entry in run.ledger] == [False, True]
    assert [entry.snapshot for entry in run.ledger] == ["policy-0000-e1", "policy-0002-e1"]
    initial, carried = (find_publication(run.store, version) for version in (0, 1))
    assert initial and carried and carried.handle == initial.handle
    assert run.trainer.count("optim_step") == 1
    assert run.trainer.count("publish policy-0001") == 0
    unchanged = run.metrics()[0]
    assert (unchanged["rollout/updated"], unchanged["rollout/kept_groups"]) == (False, 0)
    assert unchanged.keys().isdisjoint({"train/loss", "train/grad_norm", "perf/train_time"})


async def test_require_update_makes_a_step_without_signal_an_error(start: Start):
    async def play(draw: Draw) -> float:
        return 1.0

    run = await start(Script(play), rows=2, require_update=True)
    failure = await run.failure()
    assert failure.type == "NoTrainingSignal"
    assert "step 1: all completions of each row got the same reward" in failure.message
    assert "Calibrate the difficulty of the task" in failure.message
    assert run.ledger == []
    assert run.trainer.calls[-1] == "close"


async def test_the_last_batch_may_be_partial_and_rows_are_repeated_by_epochs(start: Start):
    run = await start(
        Script(),
        rows=9,
        max_rows=3,
        epochs=2,
        shuffle=True,
        prompt_groups_per_step=4,
        max_head_offpolicy_versions=1,
    )
    result = await run.result()
    assert (result.steps, result.rows) == (2, 6)
    assert [len(entry.groups) for entry in run.ledger] == [4, 2]
    assert sorted(run.trained) == ["0", "1", "2", "3", "4", "5"]
    rows = {draw.row: draw.prompt["row"] for draw in run.script.begun}
    assert {rows[cursor] for cursor in (0, 1, 2)} == {rows[cursor] for cursor in (3, 4, 5)}
    assert set(rows.values()) == {0, 1, 2}


async def test_periodic_checkpoints_are_part_of_the_ledger(start: Start):
    run = await start(Script(), rows=3, dcp_save_interval=2)
    result = await run.result()
    assert [entry.checkpoint for entry in run.ledger] == [None, "scripted/state-2", None]
    assert result.checkpoint == "scripted/state-3"
    saved = ["checkpoint/wall_time" in record for record in run.metrics()]
    assert saved == [False, True, True]  # one by the interval, and the final one


async def test_a_failed_periodic_checkpoint_is_retried_and_then_reported(start: Start):
    script = Script()
    script.trainer.refuse("save_checkpoint state-1", TrainerRejectedError("the disk is full"))
    run = await start(script, rows=1, dcp_save_interval=1, save_final_checkpoint=False)
    await run.result()
    assert run.trainer.count("save_checkpoint state-1") == 2
    first, second = (await run.status()).notes
    assert first.startswith("checkpoint of step 1, attempt 1: ") and "the disk is full" in first
    assert second.startswith("checkpoint of step 1, attempt 2: ")
    assert run.ledger[0].checkpoint is None
    assert run.metrics()[0]["checkpoint/failed"] == 1


async def test_hyper_parameters_reach_the_trainer_as_configured(start: Start):
    run = await start(
        Script(),
        rows=2,
        learning_rate=0.5,
        lr_scheduler="linear",
        grad_clip_norm=0.25,
        grad_accumulation_normalization="num_sequences",
    )
    await run.result()
    assert [adam.learning_rate for adam in run.trainer.adam] == [0.5, 0.25]
    assert all(adam.grad_clip_norm == 0.25 for adam in run.trainer.adam)
    assert all(adam.normalization == "num_sequences" for adam in run.trainer.adam)
    assert [entry.adam for entry in run.ledger] == run.trainer.adam
