"""A disk with temporary failures, for the reads and writes of one kind of activity."""

import errno
import fnmatch
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from temporalio import activity

from everburn.records import store


@dataclass
class FailingDisk:
    """For each activity type that matches `activity`, the first access to each file that matches
    `pattern` fails. times: maximum number of failures; None: no limit. reads: reads fail too.

    failed: activity type and file of each failure, in order.
    """

    activity: str = "*"
    pattern: str = "*"
    times: int | None = None
    reads: bool = True
    failed: list[tuple[str, str]] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Patch the disk access below the store's error handling."""
        write, read = store._write_atomically, LocalFileSystem.cat_file

        def write_if_it_can(path: Path, data: bytes, *, once: bool) -> None:
            self._fail(str(path))
            write(path, data, once=once)

        def read_if_it_can(fs: LocalFileSystem, path: str, *args: Any, **kwargs: Any) -> bytes:
            if self.reads:
                self._fail(path)
            found: bytes = read(fs, path, *args, **kwargs)
            return found

        monkeypatch.setattr(store, "_write_atomically", write_if_it_can)
        monkeypatch.setattr(LocalFileSystem, "cat_file", read_if_it_can)
        monkeypatch.setattr(store, "RETRY_INTERVAL", 0.01)

    def _fail(self, path: str) -> None:
        if not activity.in_activity() or len(self.failed) == self.times:
            return
        access = activity.info().activity_type, path
        fits = fnmatch.fnmatch(access[0], self.activity) and fnmatch.fnmatch(path, self.pattern)
        if fits and access not in self.failed:
            self.failed.append(access)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
