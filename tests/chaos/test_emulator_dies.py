"""kill -9 of the training service: its sessions and their snapshots are gone with it."""

import pytest

from chaos.harness import Chaos

HELD_OUT = {"name": "system.tiny_task:rows", "kwargs": {"count": 3}}


async def test_the_service_dies_between_an_update_and_its_answer(chaos: Chaos) -> None:
    chaos.plan("after serve optim_step", skip=1)
    run = await chaos.start()
    await chaos.survived(run)
    assert [entry.lease_epoch for entry in run.ledger] == [1, 2, 2, 2]


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("point", "skip"),
    [
        ("after serve create_model", 0),
        ("before serve checkpoint state-0", 0),
        ("after serve checkpoint state-0", 0),
        ("after serve save_weights_for_sampler", 0),
        ("before serve forward_backward", 1),
        ("after serve forward_backward", 1),
        ("before serve optim_step", 1),
        ("after serve save_weights_for_sampler", 2),
        ("before serve checkpoint state-2", 0),
        ("after serve checkpoint state-2", 0),
    ],
)
async def test_the_service_dies(chaos: Chaos, point: str, skip: int) -> None:
    chaos.plan(point, skip=skip)
    run = await chaos.start()
    await chaos.survived(run)


@pytest.mark.chaos
@pytest.mark.parametrize("point", ["before serve load_weights", "after serve load_weights"])
async def test_the_service_dies_again_during_the_recovery(chaos: Chaos, point: str) -> None:
    chaos.plan("after serve optim_step", skip=2)
    chaos.plan(point)
    run = await chaos.start()
    await chaos.survived(run)


@pytest.mark.chaos
async def test_the_service_dies_during_an_evaluation(chaos: Chaos) -> None:
    """The evaluation waits for its snapshot to be served again, and is then completed."""
    shard = chaos.plan("before put evaluations/000000/shard-0000.json", "freeze")
    run = await chaos.start(evaluation_dataset=HELD_OUT)
    await chaos.frozen(shard)
    chaos.stack.processes.kill("emulator")
    chaos.stack.processes.thaw("rollout")
    await chaos.survived(run)


@pytest.mark.chaos
async def test_the_service_dies_while_only_rollouts_run(chaos: Chaos) -> None:
    """Nothing trains, so only the holder's checks can notice it."""
    rollout = chaos.plan("before put rollouts/row-000000.0/completion-0.parquet", "freeze")
    run = await chaos.start(rows=4)
    await chaos.frozen(rollout)
    chaos.stack.processes.kill("emulator")
    chaos.stack.processes.thaw("rollout")
    await chaos.survived(run, steps=2)
