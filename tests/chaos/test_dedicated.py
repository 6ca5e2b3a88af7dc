"""Dedicated training among processes that die: job and deployment outlive whoever looks after them.

All of the emulator's unknowns are in their worst form.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from chaos.harness import Chaos, Run
from everburn.provisioning import find_resources
from support.waiting import until

pytestmark = pytest.mark.chaos

FULL = {"backend": "emulator-dedicated", "lora_rank": 0, "learning_rate": 0.002}
LORA = {"backend": "emulator-dedicated"}
WORST = {"applies_repetitions": True, "shares_full_parameters": True, "keeps_gradients": True}


@pytest_asyncio.fixture(loop_scope="session")
async def worst(chaos: Chaos) -> AsyncIterator[Chaos]:
    """The stack, with the worst answers to what is unknown."""
    await chaos.admin("unknowns", **WORST)
    yield chaos
    await chaos.emulator_answers()
    await chaos.admin("unknowns")
    await chaos.admin("capacity")


async def survived(chaos: Chaos, run: Run, steps: int = 4) -> None:
    """The run is what it should be, and what it made is gone."""
    result = await run.result()
    assert result.steps == steps
    await chaos.admin("unknowns")  # verification isn't on trial
    await chaos.survived(run, steps)
    resources = find_resources(run.store)
    assert resources is not None
    state = await chaos.state()
    assert state["jobs"][resources.job_id] == "JOB_STATE_DELETED"
    assert resources.deployment_id not in state["deployments"]


@pytest.mark.parametrize("fields", [FULL, LORA], ids=["full parameters", "lora"])
@pytest.mark.parametrize(
    ("point", "skip"),
    [
        ("after forward_backward", 1),
        ("before optim_step", 1),
        ("after optim_step", 1),
        ("before publish policy-0002-*", 0),
        ("after publish policy-0002-*", 0),
        ("after put publications/*/000002.json", 0),
        ("after save_checkpoint state-2", 0),
        ("after put fingerprints/*", 1),  # the first is that of state-0
    ],
)
async def test_the_trainer_dies_during_a_step(
    worst: Chaos, fields: dict[str, object], point: str, skip: int
) -> None:
    worst.plan(point, skip=skip)
    run = await worst.start(**fields)
    await survived(worst, run)
    # In which step depends on how many submissions the first one had.
    epochs = [entry.epoch for entry in run.ledger]
    assert epochs == sorted(epochs)
    assert epochs[-1] >= 2


@pytest.mark.parametrize(
    "point",
    [
        "before put provisioning.json",
        "after put provisioning.json",
        "after put holders/epoch-000001.json",
        "after put fingerprints/*",
    ],
)
async def test_the_trainer_dies_before_the_first_lease(worst: Chaos, point: str) -> None:
    worst.plan(point)
    run = await worst.start(rows=4, **FULL)
    await survived(worst, run, steps=2)


@pytest.mark.parametrize(
    "point", ["before optim_step", "after optim_step", "before publish policy-0002-e1*"]
)
async def test_a_frozen_holder_comes_back_to_a_trainer_that_is_taken(
    worst: Chaos, standby: None, point: str
) -> None:
    """It sends what it had in hand; the model it holds has been unloaded."""
    moment = worst.plan(point, "freeze", skip=0 if "0002" in point else 1)
    run = await worst.start(rows=12, **FULL)
    late = await worst.frozen(moment)
    # Until another has taken the step that the holder was at.
    await run.until_step(3)
    worst.stack.processes.thaw(late)
    await survived(worst, run, steps=6)
    assert run.ledger[-1].epoch >= 2


async def test_the_emulator_restarts(worst: Chaos) -> None:
    """Jobs and deployments are known to it afterwards; their processes and weights are gone."""
    trouble = worst.plan("before serve optim_step", skip=1)
    run = await worst.start(**FULL)
    await until(lambda: trouble.met, lambda: "nobody came", 120)
    await worst.emulator_answers()
    await worst.admin("unknowns", **WORST)
    await survived(worst, run)


async def test_the_orchestrator_dies_while_a_run_waits_for_capacity(worst: Chaos) -> None:
    await worst.admin("capacity", available=False)
    run = await worst.start(rows=4, **LORA)

    async def waits() -> bool:
        return "pending" in (await run.status()).waiting_for

    await until(waits, lambda: "the run doesn't wait", 60)
    worst.stack.processes.kill("orchestrator")
    await worst.admin("capacity", available=True)
    await survived(worst, run, steps=2)
