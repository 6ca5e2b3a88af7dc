"""kill -9 of the trainer worker before, between and after each of its writes."""

import pytest

from chaos.harness import Chaos

BEFORE_IT_SERVES = [
    # Its gradients die with it.
    "before put steps/000002/*",
    "after put steps/000002/*",
    # Applied, and nobody was told.
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
"""How often such a point is passed before step 2."""


async def test_a_step_is_applied_once_though_its_outcome_was_never_told(chaos: Chaos) -> None:
    run = await chaos.start()
    chaos.plan("after optim_step", skip=1)
    await chaos.survived(run)
    assert [entry.epoch for entry in run.ledger] == [1, 2, 2, 2]


@pytest.mark.chaos
@pytest.mark.parametrize("point", BEFORE_IT_SERVES)
async def test_the_trainer_dies_during_a_step(chaos: Chaos, point: str) -> None:
    chaos.plan(point, skip=AT_STEP_2.get(point, 0))
    run = await chaos.start()
    await chaos.survived(run)
    assert [entry.epoch for entry in run.ledger] == [1, 2, 2, 2]


@pytest.mark.chaos
async def test_the_trainer_dies_with_gradients_of_a_step(chaos: Chaos) -> None:
    """It stands still until the kill is planned: how many submissions came before isn't known."""
    begins = chaos.plan("before put steps/000002/*", "freeze")
    run = await chaos.start()
    assert await chaos.frozen(begins) == "trainer"
    chaos.plan("after forward_backward")
    chaos.stack.processes.thaw("trainer")
    await chaos.survived(run)
    assert [entry.epoch for entry in run.ledger] == [1, 2, 2, 2]


@pytest.mark.chaos
@pytest.mark.parametrize("point", ONCE_IT_SERVES)
async def test_the_trainer_dies_at_the_checkpoint_of_a_step(chaos: Chaos, point: str) -> None:
    """The step isn't undone: its version serves already."""
    chaos.plan(point)
    run = await chaos.start()
    await chaos.survived(run)
    assert [entry.epoch for entry in run.ledger] == [1, 1, 2, 2]


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
        "after put publications/epoch-000002/000002.json",
    ],
)
async def test_the_trainer_dies_again_while_it_recovers(chaos: Chaos, point: str) -> None:
    """Step 3 is lost; steps 1 and 2 are replayed from the initial state."""
    chaos.plan("after optim_step", skip=2)
    chaos.plan(point)
    run = await chaos.start(dcp_save_interval=0)
    await chaos.survived(run)
    assert [entry.epoch for entry in run.ledger] == [1, 1, 3, 3]


@pytest.mark.chaos
async def test_the_trainer_dies_during_an_evaluation(chaos: Chaos) -> None:
    """The evaluation's snapshot dies with it, and the evaluation waits until it is served again.
    The dead holder's session ends at the service."""
    held_out = {"name": "benchmarks.tiny_task:rows", "kwargs": {"count": 3}}
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
