"""A session that comes too late, or for nobody, isn't left to itself."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from everburn.trainers import Trainer, TrainerUnavailableError, dedicated, serverless
from everburn.trainers.opening import opened
from everburn.trainers.serverless import ServerlessTrainer
from support.emulator import RunningEmulator
from support.places import Place
from support.sessions import a_config
from support.waiting import until

Open = Callable[[], Awaitable[Trainer]]


@pytest.fixture(params=["serverless", "dedicated"])
def open_session(request: pytest.FixtureRequest, emulator: RunningEmulator, tmp_path: Path) -> Open:
    """Opens a session whose model takes its time."""
    if request.param == "serverless":
        opening: Open = lambda: ServerlessTrainer.open(a_config(emulator.base_url))  # noqa: E731
    else:
        place = Place(emulator, tmp_path)
        assert place.resources.advance().stage == "ready"
        request.addfinalizer(place.resources.clean_up)
        opening = lambda: place.open(1)  # noqa: E731
    emulator.plan_fault("create_model", "delay", seconds=0.5)
    return opening


async def test_one_that_comes_too_late_is_closed(
    emulator: RunningEmulator, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (serverless, dedicated):
        monkeypatch.setattr(module, "OPEN_TIMEOUT", 0.1)
    before, unloaded = models(emulator), emulator.arrivals("unload_model")
    with pytest.raises(TrainerUnavailableError, match=r"no .*session .* within 0\.1 s"):
        await open_session()
    await until(lambda: emulator.arrivals("unload_model") > unloaded)
    await until(lambda: not models(emulator) - before)


async def test_one_that_nobody_waits_for_any_more_is_closed(
    emulator: RunningEmulator, open_session: Open
) -> None:
    before, unloaded = models(emulator), emulator.arrivals("unload_model")
    asked = emulator.arrivals("create_model")
    opening = asyncio.ensure_future(opened(open_session()))
    await until(lambda: emulator.arrivals("create_model") > asked)
    opening.cancel()
    await until(lambda: emulator.arrivals("unload_model") > unloaded)
    await until(lambda: not models(emulator) - before)


def models(emulator: RunningEmulator) -> set[str]:
    sessions = emulator.admin("GET", "state")["sessions"].values()
    return {model for session in sessions for model in session["models"]}
