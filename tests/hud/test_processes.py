"""Environments in their own processes: their key, and their end in all cases."""

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
from hud.agents.base import Agent
from hud.eval.run import Run

from everburn.hud.agent import PolicyAgent
from everburn.hud.package import HUD_KEY_ENV
from everburn.hud.processes import OtherHostError, end
from everburn.hud.prompts import make_format
from everburn.hud.rollouts import HudRunFailedError
from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import GroupKey
from everburn.records.keys import rollout_key
from everburn.rollouts.contract import RolloutRun, RolloutSetup
from everburn.rollouts.runner import RolloutRunner
from everburn.rollouts.sandboxes import sandbox_keys
from support.agents import complete_elsewhere
from support.hud_runs import COUNTING, Runs, a_task
from support.sandboxes import inside

FIRST = GroupKey(cursor=0)
ACCIDENT = "TEST_ACCIDENT"
WITH_A_DAEMON = """
import subprocess
import sys

@env.initialize
async def start():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The environment, in a folder that no other process uses."""
    folder = tmp_path / "environment"
    shutil.copytree(COUNTING, folder)
    return folder / "env.py"


def append(source: Path, code: str) -> None:
    with source.open("a") as file:
        file.write(code)


async def complete(runner: RolloutRunner) -> RolloutRun:
    await runner.complete(FIRST, 0, 0)
    return read_rollout(runner.store, rollout_key(FIRST, 0))[1]


async def test_a_completion_in_a_process_of_its_own(runs: Runs, source: Path) -> None:
    runner = await runs.runner(
        [a_task("variety", start="ab")], env_path=str(source), isolation="process"
    )
    run = await complete(runner)
    assert run.info["got"] == len(set(run.answer or ""))
    assert list(inside(source.parent)) == [] == sandbox_keys(runner.store)


class Doomed(PolicyAgent):
    """Kills its worker at the first call."""

    async def __call__(self, run: Run) -> None:
        die_once(Path(os.environ[ACCIDENT]))
        await super().__call__(run)


def die_once(accident: Path) -> None:
    if not accident.exists():
        accident.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def doomed(setup: RolloutSetup) -> Agent:
    return Doomed(setup.sampler, make_format("plain", setup.tokenizer), 60)


async def test_the_next_attempt_ends_the_processes_of_a_killed_worker(
    runs: Runs, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes are the environment and a daemon that it has started in a new session."""
    monkeypatch.setenv(ACCIDENT, str(tmp_path / "accident"))
    append(source, WITH_A_DAEMON)
    tasks = [a_task("variety", start="ab")]
    runner = await runs.runner(
        tasks, env_path=str(source), isolation="process", agent=f"{__name__}:doomed"
    )
    killed = await complete_elsewhere(runner.run)
    assert killed.returncode == -9, killed.stderr
    assert len(list(inside(source.parent))) == 2

    await complete(runner)
    assert list(inside(source.parent)) == [] == sandbox_keys(runner.store)


async def test_an_environment_that_does_not_start_fails_with_its_output(
    runs: Runs, source: Path
) -> None:
    append(source, "raise OSError('no license here')\n")
    runner = await runs.runner(
        [a_task("variety", start="ab")], env_path=str(source), isolation="process"
    )
    with pytest.raises(HudRunFailedError, match=r"(?s)ended before it served.*no license here"):
        await complete(runner)
    assert sandbox_keys(runner.store) == []


@pytest.mark.parametrize("key", [None, "sk-of-the-worker"])
async def test_an_environment_has_the_workers_key_or_none(
    runs: Runs, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """Keys in `.env` next to the environment and in `~/.hud/.env`, which hud reads by default, are
    ignored."""
    (tmp_path / ".hud").mkdir()
    for folder in (tmp_path / ".hud", source.parent):
        (folder / ".env").write_text(f"{HUD_KEY_ENV}=sk-from-a-file\n")
    runner = await runs.runner(
        [a_task("where", start="ab")], env_path=str(source), isolation="process"
    )
    # For the environment only: with a key this process would report to the platform.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("everburn.hud.rollouts.hud_key", lambda: None)
    if key is not None:
        monkeypatch.setenv(HUD_KEY_ENV, key)
    run = await complete(runner)
    assert run.info["key"] == key


def test_a_process_can_only_be_ended_on_its_own_machine() -> None:
    end("a mark that nothing has", socket.gethostname())
    with pytest.raises(OtherHostError, match="it runs on elsewhere,"):
        end("a mark that nothing has", "elsewhere")
