"""A killed process restarts, a stopped one doesn't, and a failed restart is reported."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.waiting import until
from system.processes import Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """One process, `sleeper`, whose program a test can delete."""
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    program.chmod(0o700)
    opened = Processes(tmp_path)
    opened.start("sleeper", [str(program)])
    yield opened
    opened.stop_all()


async def test_a_killed_process_restarts_until_it_is_stopped(processes: Processes) -> None:
    with processes.kept_up(delay=0.0):
        processes.kill("sleeper")
        await until(lambda: processes.is_up("sleeper"))
        processes.kill("sleeper")
        processes.stop("sleeper")
        await asyncio.sleep(0.1)  # several checks for dead processes
        assert not processes.is_up("sleeper")
    assert [death.name for death in processes.deaths] == ["sleeper", "sleeper"]


async def test_a_failed_restart_is_reported(processes: Processes, tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError),
        processes.kept_up(delay=0.0),
    ):
        (tmp_path / "program").unlink()
        processes.kill("sleeper")

        def reported() -> bool:
            try:
                processes.check()
            except FileNotFoundError:
                return True
            return False

        await until(reported)


async def test_killing_a_dead_process_fails_and_names_its_log(processes: Processes) -> None:
    processes.kill("sleeper")
    with pytest.raises(RuntimeError, match=r"sleeper is down already.*sleeper\.log"):
        processes.kill("sleeper")
