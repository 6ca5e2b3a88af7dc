"""What is killed comes back, what is stopped doesn't, and what can't come back is told."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.waiting import until
from system.processes import Processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Of which one sleeps, by a program that a test can take away."""
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    program.chmod(0o700)
    opened = Processes(tmp_path)
    opened.start("sleeper", [str(program)])
    yield opened
    opened.stop_all()


async def test_what_is_killed_comes_back_until_it_is_stopped(processes: Processes) -> None:
    with processes.kept_up(delay=0.0):
        processes.kill("sleeper")
        await until(lambda: processes.is_up("sleeper"))
        processes.kill("sleeper")
        processes.stop("sleeper")
        await asyncio.sleep(0.1)  # some looks of what keeps it up
        assert not processes.is_up("sleeper")
    assert [death.name for death in processes.deaths] == ["sleeper", "sleeper"]


async def test_what_cannot_come_back_is_told(processes: Processes, tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError),
        processes.kept_up(delay=0.0),
    ):
        (tmp_path / "program").unlink()
        processes.kill("sleeper")

        def told() -> bool:
            try:
                processes.check()
            except FileNotFoundError:
                return True
            return False

        await until(told)


async def test_a_kill_of_what_is_down_says_where_to_look(processes: Processes) -> None:
    processes.kill("sleeper")
    with pytest.raises(RuntimeError, match=r"sleeper is down already.*sleeper\.log"):
        processes.kill("sleeper")
