"""Another process dies during the recovery of a trainer."""

import pytest

from chaos.harness import Chaos


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["orchestrator", "rollout", "emulator", "temporal"])
@pytest.mark.parametrize(
    "point", ["before load_checkpoint *", "after replay 1", "after publish policy-0002-e2*"]
)
async def test_another_process_dies_while_the_trainer_is_recovered(
    chaos: Chaos, victim: str, point: str
) -> None:
    """The trainer dies at step 3; the recovery is frozen until the other process has died."""
    chaos.plan("after optim_step", skip=2)
    recovery = chaos.plan(point, "freeze")
    run = await chaos.start(dcp_save_interval=0)
    assert await chaos.frozen(recovery) == "trainer"
    chaos.stack.processes.kill(victim)
    chaos.stack.processes.thaw("trainer")
    await chaos.survived(run)
    recovered = (await run.result()).recovered
    assert recovered is not None and recovered.leases == run.ledger[-1].lease_epoch >= 2
