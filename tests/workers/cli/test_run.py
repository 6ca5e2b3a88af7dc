"""`everburn run` as a user sees it."""

import json
import re
import signal
from pathlib import Path

import pytest

from everburn.emulator.models import base_model
from everburn.records.commands import ending_of
from everburn.records.ids import RunRef
from everburn.records.store import ArtifactStore
from support.command_line import Everburn, free_ports, wait_until
from workers.stack.folder import StackFolder

KEY = {"FIREWORKS_API_KEY": "fw_secret"}
TASK = """
def rows():
    return [{}]
"""

SUMS = """
import asyncio
from pathlib import Path

from everburn import RolloutRun, RolloutSample

def make_rollout_fn(setup):
    async def rollout_fn(sample_prompt):
        prompt = setup.tokenizer.encode(sample_prompt["prompt"])
        sample = await setup.sampler.sample(prompt)
        reward = float(len(set(sample.tokens)) % 2)
        segment = RolloutSample.of_sample(prompt, sample, reward)
        return RolloutRun([segment], answer=sample.text, info={"got": None})
    return rollout_fn

def rows(count):
    return [{"prompt": f"{10 + index % 90}+{10 + index // 90}="} for index in range(count)]

async def evaluate(step, rollout_fn):
    while not Path("go-on").exists():
        await asyncio.sleep(0.05)
    return {}
"""


def config(everburn: Everburn, dead_url: str, rollout: str) -> str:
    """A run whose service isn't there; it fails in its rollout function."""
    values = {
        "rollout": rollout,
        "dataset": {"name": "few:rows"},
        "base_model": "some-model",
        "tokenizer_model": "some/tokenizer",
        "lora_rank": 8,
        "backend": "serverless",
        "base_url": f"{dead_url}/training/v1/serverless",
    }
    (everburn.folder / "few.py").write_text(TASK)
    (everburn.folder / "few.json").write_text(json.dumps(values))
    return "few.json"


def test_a_failed_run_reports_its_failure_and_leaves_nothing_running(
    everburn: Everburn, dead_url: str
) -> None:
    path = config(everburn, dead_url, rollout="absent_task:make_rollout_fn")
    done = everburn("run", path, "--id", "first", *free_ports(), **KEY)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["starting the local stack ...", "run first"]
    assert lines[2].endswith("/namespaces/default/workflows/first")
    (failure,) = [line for line in lines if line.startswith("run first failed: ")]
    assert "EntrypointError: worker" in failure
    assert "can't import 'absent_task'" in failure
    assert lines[-1] == "run folder: runs/first"
    assert (everburn.folder / "runs" / "latest" / "config.json").exists()
    assert everburn.processes() == []
    assert not any("fw_secret" in text for text in texts_below(everburn.folder))


def sums(everburn: Everburn, **fields: object) -> str:
    """A slow run."""
    (everburn.folder / "sums.py").write_text(SUMS)
    values = {
        "rollout": "sums:make_rollout_fn",
        "dataset": {"name": "sums:rows", "kwargs": {"count": 8000}},
        "evaluation_interval": 1000,
        "base_model": base_model.TINY,
        "backend": "emulator",
        "lora_rank": 4,
        "prompt_groups_per_step": 2,
        "max_completion_tokens": 4,
    }
    (everburn.folder / "sums.json").write_text(json.dumps(values | fields))
    return "sums.json"


def test_the_first_interrupt_stops_gracefully_and_reports(everburn: Everburn) -> None:
    held_out = {"name": "sums:rows", "kwargs": {"count": 16}}
    (everburn.folder / ".env").write_text("OF_THE_FILE=1\n")
    run = everburn.start(
        *("run", sums(everburn, evaluation_dataset=held_out), *free_ports()),
        OF_THE_SHELL="1",
        EVERBURN_BUILD_ID="of other workers",
    )
    wait_until(lambda: [*everburn.folder.glob("runs/*/ledger/*.json")], "a step")
    stack = StackFolder(everburn.folder).find()
    assert stack is not None and stack.supervisor.process is not None
    given = stack.supervisor.process.environ()
    assert "OF_THE_SHELL" in given
    assert "OF_THE_FILE" not in given, "workers that start again read the file again"

    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=60) == 0, everburn.output
    lines = everburn.output.splitlines()
    assert any(re.fullmatch(r"stopped after \d+ steps on \d+ rows in \d:\d\d", e) for e in lines)
    assert any(re.fullmatch(r"at the token limit( +\d+ \(\d+\.\d%\)){2}", e) for e in lines)
    assert any(line.startswith("checkpoint: ") for line in lines)
    folder = everburn.folder / lines[-1].removeprefix("run folder: ")
    assert re.fullmatch(r"sums-\d{8}-\d{6}", folder.name)
    assert (everburn.folder / "runs" / "latest").resolve() == folder
    for name in ("config.json", "metrics.jsonl", "eval-before.json", "eval-after.json"):
        assert (folder / name).is_file()
    assert everburn.processes() == []


@pytest.mark.chaos  # a second stack, and two interrupts: a minute
def test_the_second_interrupt_leaves_the_run_and_prints_commands_for_it(everburn: Everburn) -> None:
    path = sums(everburn, evaluation="sums:evaluate")
    run = everburn.start("run", path, "--id", "slow", *free_ports())
    wait_until(lambda: "waits for the evaluation" in everburn.output, "the first publication")

    run.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping gracefully" in everburn.output, "the first interrupt")
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=10) == 128 + signal.SIGTERM

    stack = StackFolder(everburn.folder).find()
    assert stack is not None
    assert "everburn status slow" in everburn.output
    assert "temporal workflow cancel --workflow-id slow" in everburn.output
    assert f"kill {stack.supervisor.pid}" in everburn.output
    for name, record in stack.services.items():
        assert f"{name} {record.pid}" in everburn.output

    assert "run slow: running" in everburn("status").stdout
    assert "slow " in everburn("list").stdout
    assert "run slow is stopping gracefully" in everburn("stop", "slow").stdout
    absent = everburn("status", "absent")
    assert absent.returncode == 1
    assert "error: there is no run 'absent'" in absent.stderr
    taken = everburn("run", path, "--id", "slow")
    assert taken.returncode == 2
    assert "there is a run 'slow' already" in taken.stderr

    (everburn.folder / "go-on").touch()
    store = ArtifactStore.of(RunRef(store=str(everburn.folder / "runs"), id="slow"))
    wait_until(lambda: ending_of(store), "the run to end")
    wait_until(lambda: "completed" in everburn("list").stdout, "its workflow to be over")
    assert "run slow has already ended: completed" in everburn("stop").stdout

    dev = everburn.start("dev")
    wait_until(lambda: "already running" in everburn.output, "dev to take over the stack")
    dev.send_signal(signal.SIGINT)
    assert dev.wait(timeout=60) == 0
    assert stack.supervisor.process is None
    assert everburn.processes() == []


def texts_below(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.read_bytes().decode(errors="replace") for path in files]
