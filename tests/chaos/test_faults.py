"""Faults of a network, a gateway and a training service that keeps running."""

import uuid
from dataclasses import asdict, replace
from typing import Any

import pytest

from chaos.harness import PATIENCE, Chaos
from everburn.emulator.unknowns import WORST_CASE
from support.waiting import until
from system.audit import check_outcomes

SURVIVED_BY_THE_SESSION: list[tuple[str, str, dict[str, Any]]] = [
    ("forward_backward", "status", {"status": 409}),
    ("forward_backward", "status", {"status": 429}),
    ("optim_step", "status", {"status": 503}),
    ("optim_step", "delay", {"seconds": 2.0}),
    ("retrieve_future", "status", {"status": 503}),
    ("retrieve_future", "status", {"status": 429}),
    ("forward", "drop", {"applied": True}),
    ("sample", "drop", {"count": 3}),
    ("sample", "status", {"status": 429, "count": 3}),
    ("sample", "status", {"status": 503, "count": 3}),
]
REFUSED_THOUGH_APPLIED: list[tuple[str, int]] = [
    ("forward_backward", 409),
    ("forward_backward", 429),
    ("optim_step", 503),
]
END_THE_SESSION: list[tuple[str, str, dict[str, Any]]] = [
    # It is unknown whether these were applied, and a service may apply them again.
    ("forward_backward", "drop", {"applied": True}),
    ("forward_backward", "status", {"status": 502, "applied": True}),
    ("optim_step", "drop", {"applied": True}),
    ("optim_step", "drop", {"applied": False}),
    ("save_weights_for_sampler", "drop", {"applied": True}),
    ("save_weights", "drop", {"applied": True}),
    ("forward_backward", "status", {"status": 410}),
    ("optim_step", "status", {"status": 410, "applied": True}),
    ("optim_step", "expire_session", {}),
    ("retrieve_future", "status", {"status": 409}),
    ("retrieve_future", "status", {"status": 410}),
    ("retrieve_future", "expire_session", {}),
    ("save_weights_for_sampler", "status", {"status": 410, "applied": True}),
    ("save_weights", "status", {"status": 410, "applied": True}),
    # Every backward has succeeded, and the optimizer finds no gradients.
    ("optim_step", "wipe_gradients", {}),
    # A repetition is applied again: the update covers more sequences than were sent, or none.
    *(
        (operation, "status", {"status": status, "applied": True})
        for operation, status in REFUSED_THOUGH_APPLIED
    ),
]


async def test_vanished_gradients_are_noticed_at_the_update(chaos: Chaos) -> None:
    """The trainer forgets the first submission of a step and trains on the second only."""
    gate = chaos.folder / f"gate-{uuid.uuid4().hex[:8]}"
    run = await chaos.start(rows=2, task="chaos.tasks", extras={"late": [1], "gate": str(gate)})

    async def has_the_first() -> bool:
        new = [
            s for name, s in (await chaos.sessions()).items() if name not in chaos.known_sessions
        ]
        models = [model for session in new for model in session["models"].values()]
        return any(model["applied"].get("forward_backward") for model in models)

    await until(has_the_first, lambda: "for the first submission", PATIENCE)
    await chaos.fault("forward_backward", "wipe_gradients")
    gate.touch()
    await chaos.survived(run, steps=1)
    assert await chaos.faults() == []
    assert [entry.lease_epoch for entry in run.ledger] == [2]


async def test_a_session_that_ends_after_an_update_costs_a_recovery(chaos: Chaos) -> None:
    run = await chaos.start()
    await run.until_step(1)
    await chaos.fault("retrieve_future", "expire_session")
    await chaos.survived(run)
    assert run.ledger[-1].lease_epoch == 2


@pytest.mark.chaos
@pytest.mark.parametrize(("operation", "kind", "details"), SURVIVED_BY_THE_SESSION)
async def test_the_session_survives(
    chaos: Chaos, operation: str, kind: str, details: dict[str, Any]
) -> None:
    run = await chaos.start()
    await run.until_step(1)
    await chaos.fault(operation, kind, **details)
    await chaos.survived(run)
    assert await chaos.faults() == []
    assert {entry.lease_epoch for entry in run.ledger} == {1}


@pytest.mark.chaos
@pytest.mark.parametrize(("operation", "status"), REFUSED_THOUGH_APPLIED)
async def test_a_request_refused_after_it_was_applied_costs_no_session(
    chaos: Chaos, operation: str, status: int
) -> None:
    """This needs a service that recognizes repetitions; with another, the session is replaced
    (END_THE_SESSION)."""
    await chaos.admin("unknowns", **asdict(replace(WORST_CASE, applies_repetitions=False)))
    run = await chaos.start()
    await run.until_step(1)
    await chaos.fault(operation, "status", status=status, applied=True)
    await run.result()
    await chaos.admin("unknowns", **asdict(WORST_CASE))
    await chaos.survived(run)
    assert await chaos.faults() == []
    assert {entry.lease_epoch for entry in run.ledger} == {1}


@pytest.mark.chaos
@pytest.mark.parametrize(("operation", "kind", "details"), END_THE_SESSION)
async def test_the_session_is_replaced(
    chaos: Chaos, operation: str, kind: str, details: dict[str, Any]
) -> None:
    run = await chaos.start()
    await run.until_step(1)
    await chaos.fault(operation, kind, **details)
    await chaos.survived(run)
    assert await chaos.faults() == []
    assert run.ledger[-1].lease_epoch == 2


@pytest.mark.chaos
async def test_a_session_that_ends_while_nothing_trains_is_noticed(
    chaos: Chaos,
) -> None:
    """The holder probes the session, so the run notices its end before the next step."""
    run = await chaos.start()
    await run.until_step(1)
    await run.handle.execute_update("pause")
    await chaos.fault("get_info", "expire_session")
    await run.until(lease_epoch=2)
    assert await chaos.faults() == []
    await run.handle.execute_update("resume")
    await chaos.survived(run)


@pytest.mark.chaos
async def test_a_step_that_always_kills_its_trainer_ends_the_run_and_is_named(chaos: Chaos) -> None:
    run = await chaos.start(on_fatal="hold")
    await run.until_step(1)
    await chaos.fault("optim_step", "status", status=410, count=3)
    held = await run.until(phase="held")
    assert held.error is not None
    assert held.error.startswith(f"step {held.step + 1} lost its trainer 3 times; its rows are ")
    await run.handle.execute_update("resume")
    verified = await chaos.survived(run)
    check_outcomes(run.ref, verified)
