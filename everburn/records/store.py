"""The artifact store: a run's files by key, each written atomically.

Owns access to a folder or an object store (fsspec) for bytes, JSON and tables, digests and their
check, and retries. Doesn't own keys (keys.py) or the meaning of files.
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
"""Seconds for which a store may fail: enough to restart a server or reconnect a network."""


class StoreError(Exception):
    """An access to the store failed; names the path. Worth retrying, except for a corrupt file."""


class StoreFullError(StoreError):
    """No space is left. Retried: a person can free space while the run waits."""


class CorruptArtifactError(StoreError):
    """A file doesn't have its recorded digest, or can't be parsed. Files are written atomically, so
    reading it again doesn't help."""


class ArtifactStore:
    """The folder of one run. `folder` is a path, or a URL that fsspec understands."""

    def __init__(self, folder: str) -> None:
        import fsspec

        self.folder = folder
        # With its cache of listings, fsspec would never see files that other processes write later.
        self._fs, self._root = fsspec.core.url_to_fs(folder, use_listings_cache=False)
        self._local = "file" in _protocols(self._fs)
        # Object stores' client libraries have their own errors: botocore's aren't OSErrors.
        self._failures: tuple[type[Exception], ...] = (OSError,) if self._local else (Exception,)

    @classmethod
    def of(cls, run: RunRef) -> "ArtifactStore":
        """The store of a run; opened once per process."""
        return _open(run.folder)

    def path(self, key: str) -> str:
        """The full path of a key, for messages and other readers."""
        return str(PurePosixPath(self._root) / key)

    def exists(self, key: str) -> bool:
        """Whether a key exists. Raises StoreError."""
        path = self.path(key)
        try:
            if not self._local:
                return bool(self._fs.exists(path))
            # fsspec's `exists` returns False for every error, so finished work would be repeated.
            Path(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except self._failures as error:
            raise _failed(f"check {path}", error) from error
        return True

    def keys(self, folder: str) -> list[str]:
        """The keys directly in a folder, sorted; none if it doesn't exist. Raises StoreError."""
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

        once: an existing value stays, whichever writer wrote it: a presumed-dead writer must not
        change what others have read. Otherwise overwrites.

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
            # Not every object store raises FileExistsError.
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
        """The complete lines in the last `size` bytes of a text file; none if it doesn't exist.

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
        """A reference to a key's current value. Raises FileNotFoundError."""
        return StoredRef(key=key, sha256=digest(self.get(key)))

    def put_json(self, key: str, value: Any, *, once: bool = False) -> StoredRef:
        """Write indented JSON. NaN is refused (ValueError)."""
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
        """A key's JSON value, or None if it doesn't exist."""
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
        """Remove a key, if it exists. Raises StoreError."""
        path = self.path(key)
        try:
            self._fs.rm_file(path)
        except FileNotFoundError:
            pass
        except self._failures as error:
            raise _failed(f"delete {path}", error) from error

    def discard(self, *keys: str) -> None:
        """Remove keys that aren't needed any more. If that fails they stay, which is harmless."""
        for key in keys:
            try:
                self.delete(key)
            except StoreError as error:
                log.warning("%s; the file stays", error)

    def append_lines(self, key: str, lines: list[str]) -> None:
        """Append lines to a text file. For one writer at a time; not idempotent."""
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
                    file.write(b"\n")  # a crash cut off the last line: end it
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
    """Raises FileExistsError if the file exists and `once` is set."""
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
