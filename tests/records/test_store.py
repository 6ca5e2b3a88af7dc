"""The artifact store: atomic writes, digests, and errors such as a full disk."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from everburn.records import store as everburn_store
from everburn.records.ids import RunRef, StoredRef
from everburn.records.store import (
    ArtifactStore,
    CorruptArtifactError,
    StoreError,
    StoreFullError,
    digest,
    through_outages,
)


@pytest.fixture
def local(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "run"))


@pytest.fixture(params=["folder", "file://", "memory://"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ArtifactStore]:
    """The same store in a folder, by URL, and in an object store (in memory)."""
    folder = str(tmp_path / "run")
    yield ArtifactStore(folder if request.param == "folder" else request.param + folder)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_a_value_is_found_again_by_its_key(store: ArtifactStore):
    ref = store.put("groups/row-1/data.bin", b"\x00value")
    assert ref == StoredRef(key="groups/row-1/data.bin", sha256=digest(b"\x00value"))
    assert store.get(ref) == store.get("groups/row-1/data.bin") == b"\x00value"


def test_a_reference_can_be_made_of_the_value_of_a_key(store: ArtifactStore):
    ref = store.put("data", b"value")
    assert store.ref("data") == ref
    with pytest.raises(FileNotFoundError):
        store.ref("nothing")


def test_a_value_can_be_written_again(store: ArtifactStore):
    first = store.put("data", b"first, longer")
    second = store.put("data", b"second")
    assert first != second
    assert store.get("data") == b"second"


def test_a_digest_is_a_sha256_of_the_bytes():
    assert digest(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_missing_key_is_named(store: ArtifactStore):
    assert not store.exists("a/b")
    assert store.find_json("a/b") is None
    with pytest.raises(FileNotFoundError, match="run/a/b isn't in the store"):
        store.get("a/b")
    with pytest.raises(FileNotFoundError, match="run/a/b isn't in the store"):
        store.get(StoredRef(key="a/b", sha256="0" * 64))


def test_changed_bytes_are_noticed_where_a_digest_was_recorded(store: ArtifactStore):
    ref = store.put("data", b"recorded")
    store.put("data", b"tampered")
    assert store.get("data") == b"tampered"
    with pytest.raises(CorruptArtifactError) as caught:
        store.get(ref)
    assert str(caught.value) == (
        f"{store.path('data')} has changed since it was recorded: its sha256 is "
        f"{digest(b'tampered')}, recorded was {ref.sha256}"
    )


def test_a_truncated_file_is_noticed(local: ArtifactStore):
    ref = local.put("data", b"x" * 1000)
    os.truncate(local.path("data"), 999)
    with pytest.raises(CorruptArtifactError):
        local.get(ref)


def test_json_is_written_for_readers_and_read_back(store: ArtifactStore):
    value = {"step": 3, "names": ["a", "ä"], "nothing": None, "loss": 0.1}
    ref = store.put_json("steps/3.json", value)
    assert store.get_json(ref) == store.find_json("steps/3.json") == value
    assert store.get("steps/3.json").count(b"\n") > 4


def test_json_without_a_value_is_refused_before_anything_is_written(store: ArtifactStore):
    with pytest.raises(ValueError, match="Out of range float values"):
        store.put_json("metrics.json", {"loss": float("nan")})
    assert not store.exists("metrics.json")


def test_a_table_is_read_back_row_by_row_and_by_pandas(store: ArtifactStore, tmp_path: Path):
    schema = pa.schema([("tokens", pa.list_(pa.int32())), ("reward", pa.float64())])
    columns = {"tokens": [[1, 2, 3], [4]], "reward": [1.0, -0.5]}
    ref = store.put_table("rollouts/a.parquet", columns, schema)
    assert store.get_table(ref) == [
        {"tokens": [1, 2, 3], "reward": 1.0},
        {"tokens": [4], "reward": -0.5},
    ]
    frame = pd.read_parquet(io.BytesIO(store.get(ref)))
    assert frame.reward.tolist() == [1.0, -0.5]
    assert frame.tokens.map(list).tolist() == [[1, 2, 3], [4]]


def test_a_table_of_the_wrong_type_is_refused(store: ArtifactStore):
    with pytest.raises(pa.ArrowInvalid):
        store.put_table("a.parquet", {"n": ["text"]}, pa.schema([("n", pa.int32())]))
    assert not store.exists("a.parquet")


def test_keys_of_a_folder_are_listed_sorted(store: ArtifactStore):
    for name in ("000010", "000002", "000001"):
        store.put(f"ledger/{name}.json", b"{}")
    store.put("ledger/deeper/x", b"")
    store.put("other/y", b"")
    assert store.keys("ledger") == [
        "ledger/000001.json",
        "ledger/000002.json",
        "ledger/000010.json",
        "ledger/deeper",
    ]
    assert store.keys("none") == []


def test_lines_are_appended(store: ArtifactStore):
    store.append_lines("metrics.jsonl", ['{"a": 1}'])
    store.append_lines("metrics.jsonl", [])
    store.append_lines("metrics.jsonl", ['{"b": "ä"}', '{"c": 3}'])
    assert store.get("metrics.jsonl").decode() == '{"a": 1}\n{"b": "ä"}\n{"c": 3}\n'


def test_lines_are_appended_in_a_new_folder(store: ArtifactStore):
    store.append_lines("streams/steps/metrics.jsonl", ["{}"])
    assert store.keys("streams/steps") == ["streams/steps/metrics.jsonl"]


def test_the_last_lines_are_those_that_fit_whole(store: ArtifactStore):
    assert store.last_lines("metrics.jsonl", 100) == []
    store.append_lines("metrics.jsonl", ["ä first", "ö second", "ü third"])
    assert store.last_lines("metrics.jsonl", 100) == ["ä first", "ö second", "ü third"]
    assert store.last_lines("metrics.jsonl", 21) == ["ö second", "ü third"]
    assert store.last_lines("metrics.jsonl", 18) == ["ü third"], "even in the middle of a letter"
    assert store.last_lines("metrics.jsonl", 5) == []


def test_a_line_that_a_crash_cut_off_doesnt_spoil_the_next(local: ArtifactStore):
    local.append_lines("metrics.jsonl", ['{"step": 1}'])
    with Path(local.path("metrics.jsonl")).open("ab") as file:
        file.write(b'{"step": 2, "lo')
    local.append_lines("metrics.jsonl", ['{"step": 2}', '{"step": 3}'])
    whole = []
    for line in local.get("metrics.jsonl").splitlines():
        try:
            whole.append(json.loads(line)["step"])
        except json.JSONDecodeError:
            assert line == b'{"step": 2, "lo'
    assert whole == [1, 2, 3]


def test_the_store_of_a_run_is_its_folder(tmp_path: Path):
    run = RunRef(store=f"{tmp_path}/", id="arith-1")
    store = ArtifactStore.of(run)
    assert store.path("config.json") == f"{tmp_path}/arith-1/config.json"
    assert ArtifactStore.of(RunRef(store=f"{tmp_path}", id="arith-1")) is store


def test_other_users_can_read_what_was_written(local: ArtifactStore):
    local.put("data", b"")
    assert Path(local.path("data")).stat().st_mode & 0o777 == 0o644


# Object stores keep listings


class RemembersListings(MemoryFileSystem):
    """A client of an object store like s3fs and gcsfs: it caches listings and checks of whether a
    file exists."""

    protocol = "remembers"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("remembers://", "memory://")))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True)
        found = self.dircache.get(path) or super().ls(path, detail=True)
        return found if detail else [each["name"] for each in found]

    def exists(self, path: str, **kwargs: Any) -> bool:
        path = self._strip_protocol(path)
        try:
            if self._ls_from_cache(path) is not None:
                return True
        except FileNotFoundError:
            return False
        return super().exists(path, **kwargs)


def test_a_value_that_another_process_writes_later_is_seen():
    fsspec.register_implementation("remembers", RemembersListings, clobber=True)
    reader = ArtifactStore("remembers://bucket/run")
    writer = ArtifactStore("memory://bucket/run")
    writer.put("groups/a.json", b"{}")
    assert reader.keys("groups") == ["groups/a.json"]
    writer.put("groups/b.json", b"{}")
    assert reader.exists("groups/b.json")
    assert reader.keys("groups") == ["groups/a.json", "groups/b.json"]
    MemoryFileSystem.store.clear()


# Atomicity: real processes


WRITER = """
    import resource, signal, sys
    from everburn.records.store import ArtifactStore
    store = ArtifactStore(sys.argv[1])
"""
OLD, NEW = b"o" * 3_000_000, b"n" * 3_000_000


def start_writer(store: ArtifactStore, code: str) -> "subprocess.Popen[str]":
    program = textwrap.dedent(WRITER) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", program, store.folder], stdout=subprocess.PIPE, text=True
    )


def leftovers(store: ArtifactStore, folder: str) -> list[Path]:
    return sorted(Path(store.path(folder)).glob(".*"))


def test_a_writer_killed_in_the_middle_of_a_write_leaves_the_old_value(local: ArtifactStore):
    """The kernel kills the writer at its first byte beyond one megabyte."""
    ref = local.put("folder/data", OLD)
    writer = start_writer(
        local,
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        store.put("folder/data", b"n" * 3_000_000)
        """,
    )
    assert writer.wait(timeout=30) == -signal.SIGXFSZ
    assert [path.stat().st_size for path in leftovers(local, "folder")] == [1_000_000]
    assert local.get(ref) == OLD
    assert local.keys("folder") == ["folder/data"]
    assert local.put("folder/data", NEW).key == "folder/data"
    assert local.get("folder/data") == NEW


def test_a_reader_never_sees_a_partial_write(local: ArtifactStore):
    local.put("folder/data", OLD)
    writer = start_writer(
        local,
        """
        print("writing", flush=True)
        while True:
            for letter in (b"n", b"o"):
                store.put("folder/data", letter * 3_000_000)
        """,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        reads, seen = 0, set()
        deadline = time.monotonic() + 30
        while (reads < 50 or len(seen) < 2) and time.monotonic() < deadline:
            data = local.get("folder/data")
            assert data in (OLD, NEW)
            reads += 1
            seen.add(data)
        assert seen == {OLD, NEW}, "the writer was at work meanwhile"
    finally:
        writer.kill()
        writer.wait(timeout=30)
    assert local.get("folder/data") in (OLD, NEW)
    assert local.keys("folder") == ["folder/data"]


# A full disk


class FullDisk(io.FileIO):
    """A file on a disk with space for ten more bytes."""

    def write(self, data: Any) -> int:
        super().write(bytes(data)[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def full_disk() -> Iterator[None]:
    """Files that are opened meanwhile have no space. The patch replaces the call of the operating
    system, since a test must not fill a real disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdopen", lambda descriptor, mode: FullDisk(descriptor, mode))
        patch.setattr(Path, "open", lambda path, mode: FullDisk(path, mode))
        yield


def test_a_full_disk_is_reported_as_such_and_leaves_the_old_value(local: ArtifactStore):
    ref = local.put("folder/data", b"old value")
    with full_disk(), pytest.raises(StoreFullError) as caught:
        local.put("folder/data", b"new value, longer than ten bytes")
    assert str(caught.value) == f"can't write {local.path('folder/data')}: No space left on device"
    assert local.get(ref) == b"old value"
    assert leftovers(local, "folder") == []


def test_lines_can_be_appended_once_a_full_disk_has_space_again(local: ArtifactStore):
    lines = ['{"step": 1}', '{"step": 2, "loss": 0.5}']
    local.append_lines("metrics.jsonl", lines[:1])
    with (
        full_disk(),
        pytest.raises(StoreFullError, match=r"can't write .*\.jsonl: No space"),
    ):
        local.append_lines("metrics.jsonl", lines[1:])
    local.append_lines("metrics.jsonl", lines[1:])
    found = local.get("metrics.jsonl").decode().splitlines()
    assert [line for line in found if line in lines] == lines


def test_a_full_object_store_is_reported_as_such(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(StoreFullError, match=r"can't write /bucket/run/data: Disk quota exceeded"):
        ArtifactStore("memory://bucket/run").put("data", b"value")


class EndpointConnectionError(Exception):
    """An error class like those of object stores' client libraries: not an OSError."""


@pytest.mark.parametrize(
    ("method", "access"),
    [
        ("pipe_file", lambda store: store.put("data", b"value")),
        ("cat_file", lambda store: store.get("data")),
        ("exists", lambda store: store.exists("data")),
    ],
)
def test_an_object_store_that_cannot_be_reached_is_a_store_error(
    monkeypatch: pytest.MonkeyPatch, method: str, access: Callable[[ArtifactStore], Any]
):
    def cut_off(*args: object, **kwargs: object) -> None:
        raise EndpointConnectionError("nothing answers")

    monkeypatch.setattr(MemoryFileSystem, method, cut_off)
    with pytest.raises(StoreError, match=r"can't \w+ .*run/data: nothing answers"):
        access(ArtifactStore("memory://bucket/run"))


def test_a_failed_precondition_means_that_the_value_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The text is the one of s3fs."""
    store = ArtifactStore(f"memory://{tmp_path.name}")
    first = store.put("data", b"first", once=True)

    def refuse(*args: object, mode: str, **kwargs: object) -> None:
        assert mode == "create"
        raise OSError(errno.EINVAL, "At least one of the pre-conditions you specified did not hold")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    assert store.put("data", b"second", once=True) == first
    with pytest.raises(StoreError, match=r"can't write .*/other: At least one"):
        store.put("other", b"", once=True)


def test_any_other_failed_write_is_a_store_error(local: ArtifactStore):
    local.put("file", b"")
    with pytest.raises(StoreError, match=r"can't write .*run/file/below") as caught:
        local.put("file/below", b"")
    assert type(caught.value) is StoreError


async def test_a_failing_store_is_retried_for_a_limited_time(
    local: ArtifactStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(everburn_store, "RETRY_INTERVAL", 0.01)
    errors = [StoreError("cut off"), StoreFullError("no space"), StoreError("cut off")]

    def read(key: str) -> bytes:
        if errors:
            raise errors.pop()
        return local.get(key)

    local.put("data", b"value")
    assert await through_outages(read, "data") == b"value"
    assert not errors

    monkeypatch.setattr(everburn_store, "OUTAGE_PATIENCE", 0.03)
    errors[:] = [StoreError("cut off")] * 1000
    with pytest.raises(StoreError, match="cut off"):
        await through_outages(read, "data")
    assert len(errors) > 900


@pytest.mark.parametrize("error", [StoreError("cut off"), StoreFullError("no space")])
async def test_the_caller_decides_how_long_a_failing_store_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, error: StoreError
):
    for name in ("RETRY_INTERVAL", "OUTAGE_PATIENCE"):
        monkeypatch.setattr(everburn_store, name, 0.0)
    tried: list[int] = []

    def fail_twice() -> str:
        tried.append(len(tried))
        if len(tried) < 3:
            raise error
        return "there"

    assert await through_outages(fail_twice, patience=3600.0) == "there"
    tried.clear()
    with pytest.raises(StoreError, match=str(error)):
        await through_outages(fail_twice, patience=-1.0)
    assert tried == [0]


async def test_a_corrupt_file_is_read_once(local: ArtifactStore):
    local.put("data", b"{")
    reads: list[str] = []

    def read(key: str) -> Any:
        reads.append(key)
        return local.get_json(key)

    with pytest.raises(CorruptArtifactError, match="isn't JSON"):
        await through_outages(read, "data")
    assert reads == ["data"]


def test_a_key_that_is_a_folder_cant_be_read(local: ArtifactStore):
    local.put("folder/data", b"")
    with pytest.raises(StoreError, match=r"can't read .*run/folder: Is a directory"):
        local.get("folder")


UNUSABLE = "x" * 300
"""The name is invalid, so the operating system refuses each call with it."""


def test_a_failed_existence_check_is_not_taken_for_a_missing_value(local: ArtifactStore):
    local.put("file", b"")
    assert not local.exists("file/below")
    for question in (local.exists, local.keys, local.delete):
        with pytest.raises(StoreError, match=r"can't .*run/x+: File name too long") as caught:
            question(UNUSABLE)
        assert type(caught.value) is StoreError


@pytest.mark.parametrize("method", ["exists", "ls", "rm_file", "size"])
def test_an_object_store_that_doesnt_answer_is_a_store_error(
    monkeypatch: pytest.MonkeyPatch, method: str
):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(MemoryFileSystem, method, refuse)
    store = ArtifactStore("memory://bucket/run")
    questions: dict[str, Callable[[str], object]] = {
        "exists": store.exists,
        "ls": store.keys,
        "rm_file": store.delete,
        "size": lambda key: store.last_lines(key, 10),
    }
    with pytest.raises(StoreError, match=r"can't .* /bucket/run/data: Too many open files"):
        questions[method]("data")


def test_a_value_that_cant_be_discarded_stays_and_is_logged(
    local: ArtifactStore, caplog: pytest.LogCaptureFixture
):
    local.put("folder/data", b"")
    local.put("file", b"")
    local.discard("none", "folder", "file")
    assert local.exists("folder/data") and not local.exists("file")
    (record,) = caplog.records
    assert "can't delete" in record.message and "run/folder" in record.message


@pytest.mark.parametrize("location", ["folder", "memory"])
def test_a_value_that_is_written_once_is_never_replaced(tmp_path: Path, location: str):
    folder = str(tmp_path) if location == "folder" else f"memory://once-{tmp_path.name}"
    store = ArtifactStore(folder)
    first = store.put("folder/a.txt", b"first", once=True)

    assert store.put("folder/a.txt", b"second", once=True) == first
    assert store.get("folder/a.txt") == b"first"
    assert store.keys("folder") == ["folder/a.txt"]
    if location == "folder":
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["a.txt"], "nothing else"
