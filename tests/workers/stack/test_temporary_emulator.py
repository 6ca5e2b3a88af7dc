"""The emulator of commands without workers: the stack's if it runs, else a temporary one."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from everburn.config import parse_config
from everburn.emulator.models.base_model import TINY
from everburn.records.ids import RunRef
from everburn.records.run_folder import Owner, create_run_folder
from everburn.trainers.backends import EMULATOR_URL_ENV
from support.command_line import Everburn, wait_until
from workers.stack.folder import FolderLock, ProcessRecord, StackFolder, StackState
from workers.stack.temporary_emulator import temporary_emulator

CONFIG = {
    "rollout": "task:make",
    "dataset": "rows.jsonl",
    "base_model": TINY,
    "backend": "emulator",
    "lora_rank": 4,
}


def a_stack(folder: Path, phase: str) -> StackFolder:
    """The state of a supervisor with this process's pid; nothing runs."""
    stack = StackFolder(folder)
    stack.create()
    supervisor = ProcessRecord.of(os.getpid())
    ports = {"temporal_port": 1, "ui_port": 2, "emulator_port": 3}
    stack.write(StackState(supervisor=supervisor, phase=phase, **ports))
    return stack


def test_a_stack_stays_up_while_its_emulator_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EMULATOR_URL_ENV, "")
    stack = a_stack(tmp_path, "running")
    with closing(FolderLock(stack.attached_lock)) as supervisor:
        with temporary_emulator(stack) as home:
            assert home == stack.emulator_home
            assert os.environ[EMULATOR_URL_ENV] == "http://127.0.0.1:3"
            assert not supervisor.try_alone()
        assert supervisor.try_alone()


def test_sigterm_ends_the_temporary_emulator_of_a_verification(everburn: Everburn) -> None:
    """It uses a temporary emulator while the stack is starting or stopping."""
    a_stack(everburn.folder, "stopping")
    run = RunRef(store=str(everburn.folder / "runs"), id="short")
    create_run_folder(run, parse_config(CONFIG), Owner(first_execution_id="1"))
    verify = everburn.start("verify", "short")

    def emulator_starts() -> bool:
        assert verify.poll() is None, everburn.output
        others = [process for process in everburn.processes() if process.pid != verify.pid]
        return any(process.cpu_times().user > 0.1 for process in others)

    wait_until(emulator_starts, "a temporary emulator")
    verify.terminate()
    assert verify.wait(timeout=60) == 130, everburn.output
    assert everburn.processes() == []
