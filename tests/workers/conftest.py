from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_line import Everburn


@pytest.fixture
def everburn(tmp_path: Path) -> Iterator[Everburn]:
    command = Everburn(tmp_path.resolve())
    yield command
    command.close()
