from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_line import Everburn
from support.histories import replay_stack


@pytest.fixture
def everburn(tmp_path: Path) -> Iterator[Everburn]:
    """`everburn` in a folder; what its workflows did is replayed when the test is over."""
    command = Everburn(tmp_path.resolve())
    yield command
    command.close()
    replay_stack(command.folder)
