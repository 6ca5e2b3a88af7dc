"""A session that opens too late, or without a waiting caller, is closed."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from everburn.trainers import dedicated, serverless
from everburn.trainers.protocol import Trainer, TrainerUnavailableError
from everburn.trainers.serverless import ServerlessTrainer
from everburn.trainers.session_opening import Openings, wait_for_session
from support.emulator import RunningEmulator
from support.places import Place
from support.sessions import a_config
from support.waiting import Gate, until

Open = Callable[[], Awaitable[Trainer]]


@pytest.fixture(params=["serverless", "dedicated"])
def open_session(request: pytest.FixtureRequest, emulator: RunningEmulator, tmp_path: Path) -> Open:
    """Opens a session with a delay."""
    if request.param == "serverless":
        opening: Open = lambda: ServerlessTrainer.open(a_config(emulator.base_url))  # noqa: E731
    else:
        place = Place(emulator, tmp_path)
        assert place.provisioning.advance().stage == "ready"
        request.addfinalizer(place.provisioning.clean_up)
        opening = lambda: place.open(1)  # noqa: E731
    emulator.plan_fault("create_model", "delay", seconds=0.5)
    return opening


async def test_a_session_that_opens_too_late_is_closed(
    emulator: RunningEmulator, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (serverless, dedicated):
        monkeypatch.setattr(module, "OPEN_TIMEOUT", 0.1)
    before, unloaded = models(emulator), emulator.arrivals("unload_model")
    with pytest.raises(TrainerUnavailableError, match=r"no .*session .* within 0\.1 s"):
        await open_session()
    await until(lambda: emulator.arrivals("unload_model") > unloaded)
    await until(lambda: not models(emulator) - before)


async def test_a_session_without_a_waiting_caller_is_closed(
    emulator: RunningEmulator, open_session: Open
) -> None:
    before, unloaded = models(emulator), emulator.arrivals("unload_model")
    requested = emulator.arrivals("create_model")
    opening = asyncio.ensure_future(wait_for_session(open_session()))
    await until(lambda: emulator.arrivals("create_model") > requested)
    opening.cancel()
    await until(lambda: emulator.arrivals("unload_model") > unloaded)
    await until(lambda: not models(emulator) - before)


async def test_an_opening_continues_until_its_last_caller_is_cancelled() -> None:
    gate, begun = Gate(), []

    async def begin() -> int:
        begun.append(len(begun))
        await gate.passed()
        return begun[-1]

    openings = Openings[str, int]()
    first, second = (asyncio.ensure_future(openings.join("lease", begin)) for _ in range(2))
    await until(lambda: len(begun) == 1)
    for attempt in (first, second):
        attempt.cancel()
        await asyncio.wait([attempt])
    third, fourth = (asyncio.ensure_future(openings.join("lease", begin)) for _ in range(2))
    await until(lambda: len(begun) == 2)
    third.cancel()
    await asyncio.wait([third])
    gate.open()
    assert await fourth == 1
    assert begun == [0, 1]
    assert first.cancelled() and second.cancelled() and third.cancelled()


async def test_all_openings_can_be_cancelled() -> None:
    gate, begun = Gate(), []

    async def begin() -> None:
        begun.append(True)
        await gate.passed()

    openings = Openings[str, None]()
    waiting = asyncio.ensure_future(openings.join("lease", begin))
    await until(lambda: bool(begun))
    await openings.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def models(emulator: RunningEmulator) -> set[str]:
    sessions = emulator.admin("GET", "state")["sessions"].values()
    return {model for session in sessions for model in session["models"]}
