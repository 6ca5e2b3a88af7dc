"""kill -9 of the trainer worker before, between and after each of its writes."""

import uuid
from datetime import timedelta

import pytest

from chaos.harness import Chaos, Run
from system.histories import run_histories
from workflows.children.trainer_lease import HOLD_HEARTBEAT
from workflows.run.train_run import TrainRun

MARGIN = timedelta(seconds=2)
"""Seconds for the server to notice a timeout and to report it."""
BEFORE_IT_SERVES = [
    # Its gradients die with it.
    "before put steps/000002/*",
    "after put steps/000002/*",
    # Applied, but not reported.
    "before optim_step",
    "after optim_step",
    # Between the trainer's write and the record of it, and between the two records.
    "before publish policy-0002-*",
    "after publish policy-0002-*",
    "after put publications/*/000002.json",
    "after put publications/*/current.json",
]
ONCE_IT_SERVES = [
    "before save_checkpoint state-2",
    "after save_checkpoint state-2",
    "after put checkpoints/state-2/*",
]
AT_STEP_2 = {
    "before optim_step": 1,
    "after optim_step": 1,
    "after put publications/*/current.json": 2,
}
"""How often processes pass such a point before step 2."""


async def test_a_step_is_applied_once_even_if_its_result_is_never_reported(chaos: Chaos) -> None:
    run = await chaos.start()
    chaos.plan("after optim_step", skip=1)
    await chaos.survived(run)
    assert [entry.lease_epoch for entry in run.ledger] == [1, 2, 2, 2]


@pytest.mark.chaos
@pytest.mark.parametrize("point", BEFORE_IT_SERVES)
async def test_the_trainer_dies_during_a_step(chaos: Chaos, point: str) -> None:
    chaos.plan(point, skip=AT_STEP_2.get(point, 0))
    run = await chaos.start()
    await chaos.survived(run)
    assert [entry.lease_epoch for entry in run.ledger] == [1, 2, 2, 2]


@pytest.mark.chaos
async def test_the_trainer_dies_with_gradients_of_a_step(chaos: Chaos) -> None:
    """The trainer is frozen until the kill is planned: the number of earlier submissions varies."""
    begins = chaos.plan("before put steps/000002/*", "freeze")
    run = await chaos.start()
    assert await chaos.frozen(begins) == "trainer"
    chaos.plan("after forward_backward")
    chaos.stack.processes.thaw("trainer")
    await chaos.survived(run)
    assert [entry.lease_epoch for entry in run.ledger] == [1, 2, 2, 2]


@pytest.mark.chaos
@pytest.mark.parametrize("point", ONCE_IT_SERVES)
async def test_the_trainer_dies_at_the_checkpoint_of_a_step(chaos: Chaos, point: str) -> None:
    """The step isn't undone: its version is served already."""
    chaos.plan(point)
    run = await chaos.start()
    await chaos.survived(run)
    assert [entry.lease_epoch for entry in run.ledger] == [1, 1, 2, 2]


@pytest.mark.chaos
@pytest.mark.parametrize(
    "point",
    [
        "after open",
        "before save_checkpoint state-0",
        "after save_checkpoint state-0",
        "after put checkpoints/state-0/*",
        "after publish policy-0000-*",
        "after put publications/*/000000.json",
        "after put publications/*/current.json",
    ],
)
async def test_the_trainer_dies_before_anything_is_trained(chaos: Chaos, point: str) -> None:
    chaos.plan(point)
    run = await chaos.start(rows=4)
    await chaos.survived(run, steps=2)


@pytest.mark.chaos
@pytest.mark.parametrize(
    "point",
    [
        "before load_checkpoint *",
        "after load_checkpoint *",
        "before replay 1",
        "after replay 1",
        "after replay 2",
        "after publish policy-0002-e2*",
        "after put publications/lease-000002/000002.json",
    ],
)
async def test_the_trainer_dies_again_while_it_recovers(chaos: Chaos, point: str) -> None:
    """Step 3 is lost; steps 1 and 2 are replayed from the initial state."""
    chaos.plan("after optim_step", skip=2)
    chaos.plan(point)
    run = await chaos.start(dcp_save_interval=0)
    await chaos.survived(run)
    assert [entry.lease_epoch for entry in run.ledger] == [1, 1, 3, 3]


@pytest.mark.chaos
async def test_the_trainer_dies_during_an_evaluation(chaos: Chaos) -> None:
    """The evaluation's snapshot is lost, and the evaluation waits until it is served again.
    The dead holder's session ends at the service."""
    held_out = {"name": "system.tiny_task:rows", "kwargs": {"count": 3}}
    shard = chaos.plan("before put evaluations/000002/shard-0000.json", "freeze")
    run = await chaos.start(evaluation_dataset=held_out, evaluation_interval=2)
    assert await chaos.frozen(shard) == "rollout"
    chaos.stack.processes.kill("trainer")
    chaos.stack.processes.thaw("rollout")
    await chaos.survived(run)
    assert all(run.store.exists(f"evaluations/{version:06d}.json") for version in (0, 2, 4))
    await chaos.no_session_left()


@pytest.mark.chaos
async def test_the_trainer_dies_at_the_final_checkpoint(chaos: Chaos) -> None:
    chaos.plan("after save_checkpoint state-3")
    run = await chaos.start(rows=6)
    await chaos.survived(run, steps=3)


@pytest.mark.chaos
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_the_trainer_dies_while_it_writes_prepared_advantages(
    chaos: Chaos, moment: str
) -> None:
    chaos.plan(f"{moment} put steps/000002/advantages-*")
    run = await chaos.start(prepare_batch="chaos.tasks:prepare_batch")
    await chaos.survived(run)
    assert all(entry.prepared is not None for entry in run.ledger)
    assert [entry.lease_epoch for entry in run.ledger] == [1, 2, 2, 2]


@pytest.mark.chaos
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_the_trainer_dies_during_the_promotion(chaos: Chaos, moment: str) -> None:
    """It is then unknown whether the model was made; the run recognizes it as its own."""
    model_id = f"chaos-{uuid.uuid4().hex[:8]}"
    chaos.plan(f"{moment} promote {model_id}")
    run = await chaos.start(rows=4, output_model_id=model_id)
    await chaos.survived(run, steps=2)
    result = await run.result()
    assert result.model is not None and result.model.endswith(f"/{model_id}")


@pytest.mark.chaos
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_the_trainer_dies_while_it_loads_the_origin(chaos: Chaos, moment: str) -> None:
    first = await chaos.start(rows=4)
    await chaos.survived(first, steps=2)
    path = (await first.result()).checkpoint
    trouble = chaos.plan(f"{moment} load_checkpoint {path}")
    run = await chaos.start(rows=4, init_from_checkpoint=path)
    await chaos.survived(run, steps=2)
    assert trouble.met
    assert {entry.lease_epoch for entry in run.ledger} == {2}


@pytest.mark.chaos
async def test_a_trainer_death_is_noticed_while_nothing_trains(chaos: Chaos) -> None:
    """Within the heartbeat timeout of the activity that holds the lease, and a margin."""
    run = await chaos.start()
    await run.until_step(1)
    await run.handle.execute_update(TrainRun.pause)
    await run.until(groups_in_flight=0, groups_ready=0)
    idle = await run.status()
    assert idle.phase.endswith("collecting")
    chaos.stack.processes.kill("trainer")
    await run.until(lease_epoch=2)
    known = await reported_end_time(chaos, run)
    assert 0 < known - chaos.deaths[-1].at <= (HOLD_HEARTBEAT + MARGIN).total_seconds()
    assert (await run.status()).step == idle.step, "nothing has trained"
    await run.handle.execute_update(TrainRun.resume)
    await chaos.survived(run)


async def reported_end_time(chaos: Chaos, run: Run) -> float:
    """When the server reported the end of the first lease to the run, according to the history."""
    first = run.handle.first_execution_run_id
    assert first is not None
    (at,) = [
        event.event_time.ToNanoseconds() / 1e9
        for history in await run_histories(chaos.stack.client, run.ref.id, first)
        if history.workflow_id == run.ref.id
        for event in history.events
        if event.workflow_execution_signaled_event_attributes.signal_name == "lease_ended"
    ]
    return at
