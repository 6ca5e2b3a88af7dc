"""The local stack as real processes: shared, kept up, and never left behind."""

import signal

import pytest

from support.command_line import Everburn, free_ports, wait_until
from workers.ports import free_port
from workers.stack_folder import StackFolder, StackState
from workers.supervisor import START_TIMEOUT

SERVICES = {"temporal", "emulator", "orchestrator", "rollout", "trainer"}


def state(everburn: Everburn) -> StackState:
    found = StackFolder(everburn.folder).find()
    assert found is not None, everburn.output
    return found


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


def test_it_lasts_as_long_as_its_last_user(everburn: Everburn) -> None:
    first = everburn.start("dev", *free_ports())
    stack = wait_for_stack(everburn)
    assert stack.services.keys() == SERVICES
    assert all(record.process is not None for record in stack.services.values())
    assert f"Temporal   {stack.temporal}" in everburn.output

    second = everburn.start("dev")
    wait_for_stack(everburn)
    assert "local stack in use already" in everburn.output
    listed = everburn("list")
    assert listed.stdout == "no runs yet: start one with `everburn run CONFIG`\n"
    refused = everburn("dev", "--port", str(free_port()))
    assert refused.returncode == 2
    assert "a stack runs in this folder already, with the Temporal server" in refused.stderr

    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=60) == 0
    assert state(everburn).services == stack.services

    second.kill()
    wait_until(lambda: gone(everburn), "the stack to go with its last user, however that ended")
    assert StackFolder(everburn.folder).last() is None


def test_what_dies_is_started_again_and_the_supervisors_end_is_everythings(
    everburn: Everburn,
) -> None:
    dev = everburn.start("dev", *free_ports())
    stack = wait_for_stack(everburn)
    before = stack.services["rollout"]
    assert before.process is not None
    before.process.kill()
    wait_until(lambda: state(everburn).services["rollout"] != before, "another rollout worker")
    wait_until(lambda: "rollout ended (SIGKILL); it starts again" in everburn.output, "the news")
    assert state(everburn).services["temporal"] == stack.services["temporal"]

    assert stack.supervisor.process is not None
    stack.supervisor.process.kill()
    assert dev.wait(timeout=60) == 1
    assert "the local stack has ended" in everburn.output
    assert gone(everburn)


def test_ctrl_c_stops_everything_in_seconds(everburn: Everburn) -> None:
    dev = everburn.start("dev", *free_ports())
    wait_for_stack(everburn)
    dev.send_signal(signal.SIGINT)
    assert dev.wait(timeout=30) == 0
    assert gone(everburn)
    assert (everburn.folder / ".everburn" / "temporal.db").exists()


def test_a_service_that_cannot_start_is_told_with_its_last_words(everburn: Everburn) -> None:
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


def test_of_two_stacks_that_want_a_port_at_once_one_gets_it(
    everburn: Everburn, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Their workers must not end up at each other's servers."""
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
