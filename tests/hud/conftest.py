"""Fixtures of the tests of HUD tasks, which need the hud package."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

hud = pytest.importorskip("hud", reason="needs the extra: pip install 'everburn[hud]'")

from support.emulator import RunningEmulator  # noqa: E402
from support.hud_runs import Runs  # noqa: E402


@pytest.fixture
async def runs(emulator: RunningEmulator, tmp_path: Path) -> AsyncIterator[Runs]:
    runs = Runs(emulator, tmp_path)
    yield runs
    await runs.close()


@pytest.fixture(autouse=True)
def no_hud_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from everburn.hud.package import HUD_KEY_ENV, import_hud

    monkeypatch.delenv(HUD_KEY_ENV, raising=False)
    import_hud()
