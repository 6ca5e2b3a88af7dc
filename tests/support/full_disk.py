"""A disk without space for some files, for a while."""

import errno
import fnmatch
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from everburn.records import store


@dataclass
class FullDisk:
    """Writes of files whose names end like `pattern` are refused, so many times."""

    pattern: str
    times: int
    refused: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Below the store's own handling of errors."""
        write = store._write_atomically

        def write_if_there_is_space(path: Path, data: bytes, *, once: bool) -> None:
            if self.refused < self.times and fnmatch.fnmatch(str(path), f"*/{self.pattern}"):
                self.refused += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write(path, data, once=once)

        monkeypatch.setattr(store, "_write_atomically", write_if_there_is_space)
        monkeypatch.setattr(store, "RETRY_INTERVAL", 0.01)
