"""Two processes die at the same instant: one is frozen at a named point, then both are killed."""

import itertools

import pytest

from chaos.harness import Chaos
from system.processes import ROLES

PROCESSES = [*ROLES, "emulator", "temporal"]


@pytest.mark.chaos
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(PROCESSES, 2)))
async def test_two_processes_die_after_an_unreported_update(
    chaos: Chaos, first: str, second: str
) -> None:
    moment = chaos.plan("after optim_step", "freeze", skip=1)
    run = await chaos.start()
    await chaos.frozen(moment)
    for name in (first, second):
        chaos.stack.processes.kill(name)
    if "trainer" not in (first, second):
        chaos.stack.processes.thaw("trainer")
    await chaos.survived(run)


@pytest.mark.chaos
async def test_all_processes_die(chaos: Chaos) -> None:
    moment = chaos.plan("after put publications/*/000002.json", "freeze")
    run = await chaos.start()
    await chaos.frozen(moment)
    for name in PROCESSES:
        chaos.stack.processes.kill(name)
    await chaos.survived(run)
