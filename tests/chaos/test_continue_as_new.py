"""A process dies while a run continues as new."""

import pytest

from chaos.harness import Chaos


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["rollout", "trainer", "emulator", "temporal"])
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_process_dies_while_the_orchestrator_continues_as_new(
    chaos: Chaos, moment: str, victim: str
) -> None:
    """The orchestrator is frozen at the point until the other process has died."""
    turn = chaos.plan(f"{moment} continue_as_new", "freeze")
    run = await chaos.start()
    assert await chaos.frozen(turn) == "orchestrator"
    chaos.stack.processes.kill(victim)
    chaos.stack.processes.thaw("orchestrator")
    await chaos.survived(run)
