from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from support.command_line import Everburn
from support.histories import replay_stack


@pytest.fixture
def uninstalled_store() -> str:
    """The URL of an object store whose library this environment lacks."""
    library = "a_library_that_is_not_installed.FileSystem"
    fsspec.register_implementation("absent", library, errtxt="Install absentfs", clobber=True)
    return "absent://bucket/runs"


@pytest.fixture
def everburn(tmp_path: Path) -> Iterator[Everburn]:
    """`everburn` in a folder; its workflow histories are replayed after the test."""
    command = Everburn(tmp_path.resolve())
    yield command
    command.close()
    replay_stack(command.folder)
