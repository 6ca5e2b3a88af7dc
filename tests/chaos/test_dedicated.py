"""Dedicated training only: a job and a deployment, which outlive the worker that manages them,
hotload, the fence around a trainer that several runs may share, and its adapters.

The other files test everything else on both backends.
"""

import pytest

from chaos.harness import Chaos
from support.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.parametrize("backend", ["dedicated"])]

LORA = {"lora_rank": 4, "learning_rate": 0.01}


@pytest.mark.parametrize(
    ("point", "skip", "epochs"),
    [
        ("before optim_step", 1, [1, 2, 2, 2]),
        ("after optim_step", 1, [1, 2, 2, 2]),
        ("before publish policy-0002-*", 0, [1, 2, 2, 2]),
        ("after publish policy-0002-*", 0, [1, 2, 2, 2]),
        ("after put publications/*/000002.json", 0, [1, 2, 2, 2]),
        # The step isn't undone: its version is served already.
        ("after save_checkpoint state-2", 0, [1, 1, 2, 2]),
        ("after put fingerprints/*", 1, [1, 1, 2, 2]),  # the first is that of state-0
    ],
)
async def test_the_trainer_of_an_adapter_dies_during_a_step(
    chaos: Chaos, point: str, skip: int, epochs: list[int]
) -> None:
    chaos.plan(point, skip=skip)
    run = await chaos.start(**LORA)
    await chaos.survived(run)
    assert [entry.lease_epoch for entry in run.ledger] == epochs


async def test_the_trainer_of_an_adapter_dies_with_gradients_of_a_step(chaos: Chaos) -> None:
    begins = chaos.plan("before put steps/000002/*", "freeze")
    run = await chaos.start(**LORA)
    assert await chaos.frozen(begins) == "trainer"
    chaos.plan("after forward_backward")
    chaos.stack.processes.thaw("trainer")
    await chaos.survived(run)
    assert [entry.lease_epoch for entry in run.ledger] == [1, 2, 2, 2]


@pytest.mark.parametrize(
    "point",
    ["after put fingerprints/*", "before hotload policy-0002-*", "after hotload policy-0002-*"],
)
async def test_the_trainer_dies_at_a_call_of_dedicated_training(chaos: Chaos, point: str) -> None:
    at_checkpoint = "fingerprints" in point
    chaos.plan(point, skip=int(at_checkpoint))  # the first is that of state-0
    run = await chaos.start()
    await chaos.survived(run)
    assert [entry.lease_epoch for entry in run.ledger] == [1, 1 if at_checkpoint else 2, 2, 2]


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_the_trainer_dies_again_while_it_drops_leftover_gradients(
    chaos: Chaos, moment: str
) -> None:
    """The next holder drops the first one's gradients by an optimizer step without effect."""
    sent = chaos.plan("after forward_backward", "freeze")
    run = await chaos.start()
    assert await chaos.frozen(sent) == "trainer"
    chaos.plan(f"{moment} optim_step")
    chaos.stack.processes.kill("trainer")
    await chaos.survived(run)
    assert {entry.lease_epoch for entry in run.ledger} == {3}


@pytest.mark.parametrize(
    "point",
    [
        "before put provisioning.json",
        "after put provisioning.json",
        "after advance",
        "before put holders/lease-000001-*",
        "after put holders/lease-000001-*",
        "after put fingerprints/*",
    ],
)
async def test_the_trainer_dies_before_the_first_lease(chaos: Chaos, point: str) -> None:
    chaos.plan(point)
    run = await chaos.start(rows=4)
    await chaos.survived(run, steps=2)


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_the_trainer_dies_during_the_cleanup(chaos: Chaos, moment: str) -> None:
    chaos.plan(f"{moment} clean_up")
    run = await chaos.start(rows=4)
    await chaos.survived(run, steps=2)
    assert {entry.lease_epoch for entry in run.ledger} == {1}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "call", ["create_job", "create_deployment", "hotload", "delete_deployment", "delete_job"]
)
async def test_the_service_dies_during_provisioning(chaos: Chaos, call: str, moment: str) -> None:
    """The service keeps the jobs and deployments that it has recorded."""
    chaos.plan(f"{moment} serve {call}")
    run = await chaos.start(rows=4)
    await chaos.survived(run, steps=2)


@pytest.mark.parametrize(
    "point", ["before optim_step", "after optim_step", "before publish policy-0002-e1*"]
)
async def test_a_frozen_holder_comes_back_after_it_was_replaced(
    chaos: Chaos, standby: None, point: str
) -> None:
    """The holder sends its pending request for a model that has been unloaded."""
    moment = chaos.plan(point, "freeze", skip=0 if "0002" in point else 1)
    run = await chaos.start(rows=12)
    late = await chaos.frozen(moment)
    # Until another holder has committed the step of the frozen one.
    await run.until_step(3)
    chaos.stack.processes.thaw(late)
    await chaos.survived(run, steps=6)
    assert [entry.lease_epoch for entry in run.ledger] == [1, 2, 2, 2, 2, 2]


async def test_the_orchestrator_dies_while_a_run_waits_for_capacity(chaos: Chaos) -> None:
    await chaos.admin("capacity", available=False)
    run = await chaos.start(rows=4, **LORA)

    async def waits() -> bool:
        return "pending" in (await run.status()).waiting_for

    await until(waits, lambda: "the run doesn't wait", 60)
    chaos.stack.processes.kill("orchestrator")
    await chaos.admin("capacity", available=True)
    await chaos.survived(run, steps=2)
