"""A run does what its error's row in the table of errors says.

For the mapping of service errors to rows see trainers/test_errors.py and
trainers/test_control_plane.py.
"""

from collections.abc import Awaitable, Callable

import pytest

from everburn.trainers.errors import RULES, Reaction
from everburn.trainers.protocol import TrainerError
from support.farm import Start
from support.script import Script
from workflows.children import trainer_lease
from workflows.run import recovery
from workflows.run import start as first_lease

PROMISES = sorted({(r.reaction, r.error) for r in RULES}, key=lambda pair: (pair[0], str(pair[1])))


async def retries(start: Start, error: type[TrainerError]) -> None:
    """A session is requested a few times, not forever."""
    script = Script()
    script.trainer.refuse("open", error("said by the service"))
    run = await start(script, rows=1)
    failure = await run.failure()
    assert (failure.type, failure.message) == (error.__name__, "said by the service")
    assert run.trainer.count("open") == trainer_lease.ACQUIRE_ATTEMPTS.maximum_attempts


async def waits(start: Start, error: type[TrainerError]) -> None:
    """The run waits without a limit: the test sets START_PATIENCE to zero."""
    script = Script()
    script.trainer.refuse("open", error("said by the service"))
    run = await start(script, rows=1)
    waiting = await run.until(phase="waiting for capacity")
    assert "said by the service" in waiting.waiting_for
    script.trainer.mend()
    assert (await run.result()).steps == 1


async def replaces(start: Start, error: type[TrainerError]) -> None:
    script = Script()
    script.trainer.fail_once("optim_step", error("said by the service"))
    run = await start(script, rows=1)
    assert (await run.result()).steps == 1
    assert [entry.lease_epoch for entry in run.ledger] == [2]


async def fails(start: Start, error: type[TrainerError]) -> None:
    """The run fails at once with the service's text, at its start and in a step."""
    for call in ("open", "forward_backward"):
        script = Script()
        script.trainer.refuse(call, error("said by the service"))
        run = await start(script, rows=1)
        failure = await run.failure()
        assert (failure.type, failure.message) == (error.__name__, "said by the service")
        assert run.trainer.count("open") == 1


async def holds(start: Start, error: type[TrainerError]) -> None:
    """The run is held whatever on_fatal says, and continues from its current state."""
    for call in ("open", "optim_step"):
        script = Script()
        script.trainer.fail_once(call, error("said by the service"))
        run = await start(script, rows=1)
        held = await run.until(phase="held")
        assert held.error == "said by the service"
        await run.handle.execute_update("resume")
        assert (await run.result()).steps == 1


BEHAVIOURS: dict[Reaction, Callable[[Start, type[TrainerError]], Awaitable[None]]] = {
    "retry": retries,
    "wait": waits,
    "replace": replaces,
    "fail": fails,
    "hold": holds,
}


@pytest.mark.parametrize(("reaction", "error"), PROMISES)
async def test_a_run_handles_each_error_as_its_row_of_the_table_says(
    start_tuned: Start,
    quick_acquisition: None,
    monkeypatch: pytest.MonkeyPatch,
    reaction: Reaction,
    error: type[TrainerError],
) -> None:
    monkeypatch.setattr(first_lease, "START_PATIENCE", 0.0)
    monkeypatch.setattr(recovery, "BACKOFF", (0,))
    await BEHAVIOURS[reaction](start_tuned, error)
