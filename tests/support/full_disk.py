"""A disk that temporarily has no space for some files."""

import errno
import fnmatch
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from everburn.records import store


@dataclass
class FullDisk:
    """The first `times` writes of files that match `pattern` fail."""

    pattern: str
    times: int
    refused: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Patch the disk access below the store's error handling."""
        write = store._write_atomically

        def write_if_there_is_space(path: Path, data: bytes, *, once: bool) -> None:
            if self.refused < self.times and fnmatch.fnmatch(str(path), f"*/{self.pattern}"):
                self.refused += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write(path, data, once=once)

        monkeypatch.setattr(store, "_write_atomically", write_if_there_is_space)
        monkeypatch.setattr(store, "RETRY_INTERVAL", 0.01)
