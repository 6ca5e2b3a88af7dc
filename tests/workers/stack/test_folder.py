import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from workers.stack.folder import FolderLock, ProcessRecord, StackFolder, StackState, end_leftovers


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def state(supervisor: ProcessRecord, **services: ProcessRecord) -> StackState:
    return StackState(
        supervisor=supervisor,
        temporal_port=7233,
        ui_port=8233,
        emulator_port=8780,
        services=services,
    )


def test_a_record_does_not_match_a_later_process_with_the_same_pid(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    record = ProcessRecord.of(sleeper.pid)
    assert record.process is not None
    assert ProcessRecord(pid=sleeper.pid, created=record.created - 1).process is None
    sleeper.kill()
    sleeper.wait()
    assert record.process is None


def test_the_previous_log_is_kept(tmp_path: Path) -> None:
    folder = StackFolder(tmp_path)
    folder.create()
    for words in ("first", "second", "third"):
        folder.begin_log("rollout")
        assert not folder.log("rollout").exists()
        folder.log("rollout").write_text(words)
    assert {path.name: path.read_text() for path in folder.logs.iterdir()} == {
        "rollout.log": "third",
        "rollout.1.log": "second",
    }


def test_a_state_is_valid_while_its_supervisor_lives(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]"
) -> None:
    folder = StackFolder(tmp_path)
    assert folder.find() is None
    folder.create()
    written = state(ProcessRecord.of(sleeper.pid))
    folder.write(written)
    assert folder.find() == written
    sleeper.kill()
    sleeper.wait()
    assert folder.find() is None
    assert folder.last() == written


def test_leftovers_of_a_killed_supervisor_are_ended(sleeper: "subprocess.Popen[bytes]") -> None:
    gone = ProcessRecord(pid=sleeper.pid, created=1.0)
    end_leftovers(state(gone, worker=gone))
    assert sleeper.poll() is None
    end_leftovers(state(gone, worker=ProcessRecord.of(sleeper.pid)))
    assert not psutil.pid_exists(sleeper.pid)


def test_a_lock_is_exclusive_only_if_no_holder_shares_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with closing(FolderLock(path)) as first, closing(FolderLock(path)) as second:
        first.share()
        second.share()
        with closing(FolderLock(path)) as other:
            assert not other.try_alone()
            first.release()
            assert not other.try_alone()
            second.release()
            assert other.try_alone()
