"""The artifact store: a run's files, written once, atomically, and found again by key.

Owns how bytes, JSON and tables reach a folder or an object store (fsspec), digests and their
check, and idempotence: a key is written by one writer's value or the same value again. Doesn't
own keys (ids.py) or what files mean.
"""

import asyncio
import errno
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

from everburn.records.ids import RunRef, StoredRef
from everburn.usercode.threads import to_thread

T = TypeVar("T")

log = logging.getLogger(__name__)

RETRY_INTERVAL = 2.0
"""Seconds between attempts while a store is full or fails."""
OUTAGE_PATIENCE = 300.0
"""Seconds for which one may fail: a server that is started again, a network that is cut off."""


class StoreError(Exception):
    """The store couldn't do what was asked; says where. Worth retrying, but for a corrupt file."""


class StoreFullError(StoreError):
    """No space is left. Retried: space can be made while the run waits."""


class CorruptArtifactError(StoreError):
    """A file's bytes don't have the digest they were recorded with, or can't be parsed. Files are
    written whole: reading it again won't help."""


class ArtifactStore:
    """The folder of one run. `folder` is a path, or a URL that fsspec understands."""

    def __init__(self, folder: str) -> None:
        import fsspec

        self.folder = folder
        # Object stores remember listings, and would never see what other processes write later.
        self._fs, self._root = fsspec.core.url_to_fs(folder, use_listings_cache=False)
        self._local = "file" in _protocols(self._fs)
        # Object stores' client libraries have errors of their own: botocore's aren't OSErrors.
        self._failures: tuple[type[Exception], ...] = (OSError,) if self._local else (Exception,)

    @classmethod
    def of(cls, run: RunRef) -> "ArtifactStore":
        """The store of a run; opened once per process."""
        return _open(run.folder)

    def path(self, key: str) -> str:
        """The full name of a key, for messages and for other readers."""
        return str(PurePosixPath(self._root) / key)

    def exists(self, key: str) -> bool:
        """Whether there is anything under a key.

        Raises:
            StoreError: that can't be told now.
        """
        path = self.path(key)
        try:
            if not self._local:
                return bool(self._fs.exists(path))
            # fsspec takes every error for an answer; what was written would be done again.
            Path(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except self._failures as error:
            raise _failed(f"look for {path}", error) from error
        return True

    def keys(self, folder: str) -> list[str]:
        """The keys directly below a folder of the store, sorted; none when it isn't there.

        Raises:
            StoreError
        """
        path = self.path(folder)
        try:
            names = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        except self._failures as error:
            raise _failed(f"list {path}", error) from error
        found = (PurePosixPath(name).name for name in names)
        return sorted(f"{folder}/{name}" for name in found if not name.startswith("."))

    def put(self, key: str, data: bytes, *, once: bool = False) -> StoredRef:
        """Write atomically: a reader finds the whole value or none.

        once: what is there already stays, whoever wrote it; a writer that was given up and comes
        back late must not change what others have read. Otherwise overwrites.

        Raises:
            StoreFullError, StoreError
        """
        path = self.path(key)
        try:
            if self._local:
                _write_atomically(Path(path), data, once=once)
            else:
                self._fs.pipe_file(path, data, mode="create" if once else "overwrite")
        except self._failures as error:
            # Whatever it is called: not every object store says FileExistsError.
            if once and self.exists(key):
                return self.ref(key)
            raise _failed(f"write {path}", error) from error
        return StoredRef(key=key, sha256=digest(data))

    def get(self, ref: str | StoredRef) -> bytes:
        """Read a key; given a StoredRef, check the digest.

        Raises:
            FileNotFoundError, CorruptArtifactError, StoreError
        """
        key = ref if isinstance(ref, str) else ref.key
        path = self.path(key)
        try:
            data = bytes(self._fs.cat_file(path))
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} isn't in the store") from None
        except self._failures as error:
            raise _failed(f"read {path}", error) from error
        if isinstance(ref, StoredRef) and digest(data) != ref.sha256:
            raise CorruptArtifactError(
                f"{path} has changed since it was recorded: its sha256 is {digest(data)}, "
                f"recorded was {ref.sha256}"
            )
        return data

    def last_lines(self, key: str, size: int) -> list[str]:
        """The lines of a text file that its last `size` bytes hold whole; none if it isn't there.

        Raises:
            StoreError
        """
        path = self.path(key)
        try:
            start = max(0, self._fs.size(path) - size)
            data = bytes(self._fs.cat_file(path, start=start))
        except FileNotFoundError:
            return []
        except self._failures as error:
            raise _failed(f"read {path}", error) from error
        whole = data.partition(b"\n")[2] if start else data
        return whole.decode().splitlines()

    def ref(self, key: str) -> StoredRef:
        """A reference to what a key holds now. Raises FileNotFoundError."""
        return StoredRef(key=key, sha256=digest(self.get(key)))

    def put_json(self, key: str, value: Any, *, once: bool = False) -> StoredRef:
        """Write JSON, indented for a reader. NaN is refused (ValueError)."""
        data = json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"
        return self.put(key, data, once=once)

    def get_json(self, ref: str | StoredRef) -> Any:
        """A key's JSON value.

        Raises:
            FileNotFoundError, CorruptArtifactError, StoreError
        """
        try:
            return json.loads(self.get(ref))
        except ValueError as error:
            path = self.path(ref if isinstance(ref, str) else ref.key)
            raise CorruptArtifactError(f"{path} isn't JSON: {error}") from None

    def find_json(self, key: str) -> Any | None:
        """The value of a key, or None where it isn't there."""
        try:
            return self.get_json(key)
        except FileNotFoundError:
            return None

    def put_table(self, key: str, columns: dict[str, list[Any]], schema: Any) -> StoredRef:
        """Write a Parquet file with a pyarrow schema, once."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pydict(columns, schema=schema), sink, compression="zstd")
        return self.put(key, sink.getvalue().to_pybytes(), once=True)

    def get_table(self, ref: str | StoredRef) -> list[dict[str, Any]]:
        """The rows of a Parquet file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows: list[dict[str, Any]] = pq.read_table(pa.BufferReader(self.get(ref))).to_pylist()
        return rows

    def delete(self, key: str) -> None:
        """Remove a key; one that isn't there is fine.

        Raises:
            StoreError
        """
        path = self.path(key)
        try:
            self._fs.rm_file(path)
        except FileNotFoundError:
            pass
        except self._failures as error:
            raise _failed(f"delete {path}", error) from error

    def discard(self, *keys: str) -> None:
        """Remove keys that have done their work. What can't be removed stays, and harms nobody."""
        for key in keys:
            try:
                self.delete(key)
            except StoreError as error:
                log.warning("%s; it is left there", error)

    def append_lines(self, key: str, lines: list[str]) -> None:
        """Add lines to a text file. For one writer at a time; callers keep it idempotent."""
        path = self.path(key)
        data = "".join(f"{line}\n" for line in lines).encode()
        if not self._local:
            previous = self.get(key) if self.exists(key) else b""
            self.put(key, previous + data)
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with Path(path).open("ab+") as file:
                if file.tell() and not _ends_line(file):
                    file.write(b"\n")  # a crash cut the last line off: leave it a line of its own
                file.write(data)
        except OSError as error:
            raise _failed(f"write {path}", error) from error


async def when_there_is_space(write: Callable[..., T], *arguments: Any) -> T:
    """Run a write in a thread, again and again while the store is full. For callers that are
    retried after any other error."""
    while True:
        try:
            return await to_thread(write, *arguments)
        except StoreFullError as error:
            await _pause(error)


async def through_outages(
    access: Callable[..., T], *arguments: Any, patience: float | None = None
) -> T:
    """Run a read or write in a thread, again while the store is full or fails. For callers that
    nothing retries.

    patience: seconds after which to give up; by default OUTAGE_PATIENCE after the first failure,
    and never while the store is full.

    Raises:
        StoreFullError, StoreError: the store was full or failed for too long.
        CorruptArtifactError, and whatever else `access` raises.
    """
    full_until = math.inf if patience is None else time.monotonic() + patience
    failing_until = None if patience is None else full_until
    while True:
        try:
            return await to_thread(access, *arguments)
        except CorruptArtifactError:
            raise
        except StoreError as error:
            until = full_until
            if not isinstance(error, StoreFullError):
                until = failing_until = failing_until or time.monotonic() + OUTAGE_PATIENCE
            if time.monotonic() >= until:
                raise
            await _pause(error)


async def _pause(error: StoreError) -> None:
    log.warning("%s; next attempt in %g s", error, RETRY_INTERVAL)
    await asyncio.sleep(RETRY_INTERVAL)


@lru_cache(maxsize=64)
def _open(folder: str) -> ArtifactStore:
    return ArtifactStore(folder)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _failed(what: str, error: Exception) -> StoreError:
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    kind = StoreFullError if full else StoreError
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return kind(f"can't {what}: {why}")


def _protocols(fs: Any) -> tuple[str, ...]:
    protocol = fs.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _ends_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _write_atomically(path: Path, data: bytes, *, once: bool) -> None:
    """Raises FileExistsError if the file is there and is to be written once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(temporary).chmod(0o644)
        if once:
            path.hardlink_to(temporary)
        else:
            Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
