"""Imports that take seconds are made by one thread at a time."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.imports import import_all

SLOW = """
import time
import journal

journal.lines.append("begin")
time.sleep(0.2)
journal.lines.append("end")
answer = 42
"""


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the importing of two slow modules has written."""
    (tmp_path / "journal.py").write_text("lines = []\n")
    for name in ("slow_one", "slow_two"):
        (tmp_path / f"{name}.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    import_all("journal")
    import journal  # type: ignore[import-not-found]

    yield journal.lines
    for name in ("journal", "slow_one", "slow_two"):
        del sys.modules[name]


def test_whoever_comes_second_waits(journal: list[str]) -> None:
    wanted = [("slow_one:answer", "slow_two"), ("slow_two:answer", "slow_one")]
    threads = [threading.Thread(target=import_all, args=names) for names in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert journal == ["begin", "end", "begin", "end"]


def test_a_name_that_is_not_there_is_an_error(journal: list[str]) -> None:
    with pytest.raises(AttributeError, match="question"):
        import_all("slow_one:question")
    import_all("slow_one:answer", "slow_two")
