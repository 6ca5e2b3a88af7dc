"""The local stack as real processes: shared, kept up, and never orphaned."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from support.command_line import Everburn, free_ports, wait_until
from workers.stack.attachment import Stack
from workers.stack.folder import FolderLock, ProcessRecord, StackFolder, StackState
from workers.stack.ports import free_port
from workers.stack.supervisor import START_TIMEOUT

SERVICES = {"temporal", "emulator", "orchestrator", "rollout", "trainer"}


def state(everburn: Everburn) -> StackState:
    found = StackFolder(everburn.folder).find()
    assert found is not None, everburn.output
    return found


def a_state(supervisor: ProcessRecord, **services: ProcessRecord) -> StackState:
    """A state whose stack was never started."""
    return StackState(
        supervisor=supervisor,
        phase="running",
        temporal_port=7233,
        ui_port=8233,
        emulator_port=8780,
        services=services,
    )


def wait_for_stack(everburn: Everburn) -> StackState:
    wait_until(
        lambda: "(supervisor pid" in everburn.output or "error:" in everburn.output,
        "the stack to be up, or the reason why it isn't",
        timeout=START_TIMEOUT + 30,
    )
    assert "(supervisor pid" in everburn.output, everburn.told()
    found = state(everburn)
    assert found.phase == "running"
    return found


def gone(everburn: Everburn) -> bool:
    return not everburn.processes()


def test_a_stack_stops_with_its_last_user(everburn: Everburn) -> None:
    first = everburn.start("dev", *free_ports())
    stack = wait_for_stack(everburn)
    assert stack.services.keys() == SERVICES
    assert all(record.process is not None for record in stack.services.values())
    assert f"Temporal   {stack.temporal}" in everburn.output

    second = everburn.start("dev")
    wait_for_stack(everburn)
    assert "local stack already running" in everburn.output
    listed = everburn("list")
    assert listed.stdout == "no runs yet: start one with `everburn run CONFIG`\n"
    refused = everburn("dev", "--port", str(free_port()))
    assert refused.returncode == 2
    assert "a stack is already running in this folder, with the Temporal server" in refused.stderr

    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=60) == 0
    assert state(everburn).services == stack.services

    second.kill()
    wait_until(lambda: gone(everburn), "the stack to go with its last user, however that ended")
    assert StackFolder(everburn.folder).last() is None


@contextmanager
def full_disk(process: psutil.Process) -> Iterator[None]:
    """The process and its new children can't write to files."""
    soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))


def started_workers(everburn: Everburn, role: str) -> set[int]:
    """Current pids; the supervisor's record may be older."""
    found = set()
    for process in everburn.processes():
        with contextlib.suppress(psutil.Error):
            if ["worker", role] == process.cmdline()[4:6]:
                found.add(process.pid)
    return found


def test_dead_services_are_restarted_and_all_end_with_the_supervisor(
    everburn: Everburn,
) -> None:
    dev = everburn.start("dev", *free_ports())
    stack = wait_for_stack(everburn)
    before = stack.services["rollout"]
    assert before.process is not None
    before.process.kill()
    wait_until(lambda: state(everburn).services["rollout"] != before, "another rollout worker")
    wait_until(lambda: "rollout ended (SIGKILL); it restarts" in everburn.output, "the news")
    assert state(everburn).services["temporal"] == stack.services["temporal"]

    supervisor = stack.supervisor.process
    assert supervisor is not None
    before = stack.services["orchestrator"]
    assert before.process is not None
    with full_disk(supervisor):
        for log in StackFolder(everburn.folder).logs.iterdir():
            log.unlink()  # to free space
        before.process.kill()
        wait_until(
            lambda: started_workers(everburn, "orchestrator") - {before.pid},
            "another orchestrator worker",
        )
        assert state(everburn).services["orchestrator"] == before
    (again,) = started_workers(everburn, "orchestrator")
    wait_until(lambda: state(everburn).services["orchestrator"].pid == again, "its record")
    assert dev.poll() is None

    supervisor.kill()
    assert dev.wait(timeout=60) == 1
    assert "the local stack has ended" in everburn.output
    assert gone(everburn)


def test_the_end_of_the_supervisor_is_reported_once(tmp_path: Path) -> None:
    """Also if a user has deleted the stack's log."""
    folder = StackFolder(tmp_path)
    folder.create()
    gone = ProcessRecord(pid=os.getpid(), created=1.0)
    stack = Stack(folder, FolderLock(folder.attached_lock), a_state(gone), own=False)
    (line,) = stack.news()
    assert "supervisor is gone, so services that end aren't restarted" in line
    folder.log("stack").write_text("12:00:00 its last words\n")
    assert stack.news() == ["12:00:00 its last words"]
    folder.log("stack").unlink()
    assert stack.news() == []
    stack.detach()


def test_a_command_whose_supervisor_was_killed_does_not_end_a_newer_stack(tmp_path: Path) -> None:
    folder = StackFolder(tmp_path)
    folder.create()
    lock = FolderLock(folder.attached_lock)
    lock.share()
    gone = ProcessRecord(pid=os.getpid(), created=1.0)
    stack = Stack(folder, lock, a_state(gone), own=True)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command) as service:
        try:
            theirs = {"trainer": ProcessRecord.of(service.pid)}
            folder.write(a_state(ProcessRecord.of(os.getpid()), **theirs))
            stack.detach()
            assert service.poll() is None
        finally:
            service.kill()


def test_ctrl_c_stops_everything_in_seconds(everburn: Everburn) -> None:
    dev = everburn.start("dev", *free_ports())
    wait_for_stack(everburn)
    dev.send_signal(signal.SIGINT)
    assert dev.wait(timeout=30) == 0
    assert gone(everburn)
    assert (everburn.folder / ".everburn" / "temporal.db").exists()


def test_a_service_that_cannot_start_is_reported_with_its_last_line(everburn: Everburn) -> None:
    folder = StackFolder(everburn.folder)
    folder.create()
    folder.database.write_text("this is no database")
    folder.log("temporal").write_text("the last words of the stack before\n")
    done = everburn("dev", *free_ports())
    assert done.returncode == 1
    assert "error: the local stack didn't start: temporal ended at its start" in done.stderr
    assert "see .everburn/logs/temporal.log" in done.stderr
    assert "not a database" in done.stderr
    assert gone(everburn)
    assert "the stack before" not in folder.log("temporal").read_text()
    kept = folder.logs / "temporal.1.log"
    assert kept.read_text() == "the last words of the stack before\n"


def test_one_of_two_stacks_that_request_the_same_port_gets_it(
    everburn: Everburn, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Their workers must not connect to each other's servers."""
    other = Everburn(tmp_path_factory.mktemp("other").resolve())
    emulator_port = str(free_port())
    try:
        for each in (everburn, other):
            own = ["--port", str(free_port()), "--ui-port", str(free_port())]
            each.start("dev", *own, "--emulator-port", emulator_port)
        refused = f"error: port {emulator_port} for the emulator is in use"
        up = "(supervisor pid"
        wait_until(
            lambda: all(up in e.output or refused in e.output for e in (everburn, other)),
            "both to be up or refused",
            timeout=START_TIMEOUT + 30,
        )
        assert sorted(refused in each.output for each in (everburn, other)) == [False, True]
    finally:
        other.close()
