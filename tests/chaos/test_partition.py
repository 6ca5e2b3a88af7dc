"""The holder of a lease is frozen until another has taken over, and then comes back."""

import pytest

from chaos.harness import Chaos


@pytest.mark.chaos
@pytest.mark.parametrize(
    "point",
    [
        "before optim_step",
        "after optim_step",
        "after publish policy-0002-e1*",
        # It has checked that no other holder publishes, and is about to write.
        "before put publications/*/000002.json",
        "before put publications/*/current.json",
        "after save_checkpoint state-2",
        "before put checkpoints/state-2/*",
    ],
)
async def test_a_holder_that_comes_back_changes_nothing(
    chaos: Chaos, standby: None, point: str
) -> None:
    current = point.endswith("current.json")
    moment = chaos.plan(point, "freeze", skip=2 if current else 0)
    run = await chaos.start(rows=12)
    late = await chaos.frozen(moment)
    # Until another holder has committed the step of the frozen one.
    await run.until_step(3)
    records = [key for key in run.store.keys("publications/lease-000002") if "current" not in key]
    published = {key: run.store.get(key) for key in records}
    chaos.stack.processes.thaw(late)
    await chaos.survived(run, steps=6)
    await chaos.no_session_left()
    assert run.ledger[-1].lease_epoch == 2
    assert published
    assert {key: run.store.get(key) for key in published} == published


@pytest.mark.chaos
async def test_a_session_that_was_opened_too_late_is_closed(chaos: Chaos, standby: None) -> None:
    """Its activity was given up, and another worker holds the same lease."""
    moment = chaos.plan("after open", "freeze")
    run = await chaos.start()
    late = await chaos.frozen(moment)
    await run.until_step(1)
    chaos.stack.processes.thaw(late)
    await chaos.survived(run)
    assert {entry.lease_epoch for entry in run.ledger} == {1}
    await chaos.no_session_left()
