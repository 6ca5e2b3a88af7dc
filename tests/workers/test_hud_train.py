"""`everburn hud train` as a person sees it, on the emulator's tiny base model."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from everburn.emulator.base_model import TINY
from everburn.ledger import read_ledger
from everburn.refs import RunRef
from everburn.store import ArtifactStore
from support.command_line import Everburn, wait_until
from workers.stack_folder import StackFolder

pytest.importorskip("hud", reason="needs the extra: pip install 'everburn[hud]'")

ENV = """
from hud import Environment
from hud.graders import EvaluationResult

env = Environment(name="letters")

@env.template()
async def many(start: str):
    answer = yield start
    text = answer or ""
    if text.startswith("{"):
        raise RuntimeError("no judge today")
    got = len(set(text))
    yield EvaluationResult(reward=float(got % 2), content=text, info={"got": got})
"""
TASKS = """
from env import many
tasks = [many(start=a + b) for a in "abcd" for b in "efgh"]
"""
TRAIN = (
    *("hud", "train", "--backend", "emulator", "--base-model", TINY, "--lora-rank", "4"),
    *("--tasks-file", "mine/tasks.py", "--env-path", "mine/env.py", "--max-tokens", "6"),
    *("--tasks-per-step", "2", "--group-size", "4", "--eval-tasks", "3", "--output-dir", "out"),
)


@pytest.fixture
def folder(everburn: Everburn) -> Path:
    mine = everburn.folder / "mine"
    mine.mkdir()
    (mine / "env.py").write_text(ENV)
    (mine / "tasks.py").write_text(TASKS)
    return everburn.folder


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


def test_the_recipes_files_and_a_run_that_outlives_its_rollout_worker(
    everburn: Everburn, folder: Path
) -> None:
    (folder / "out").mkdir()
    (folder / "out/eval-before.json").write_text("stale")
    (folder / "out/metrics.jsonl").write_text("stale\n")
    run = everburn.start(*TRAIN, "--steps", "4", "--checkpoint-every", "2", HUD_API_KEY="")
    wait_until(lambda: "step 01/4" in everburn.output, "the first step", timeout=300)
    stack = StackFolder(folder).find()
    assert stack is not None
    os.kill(stack.services["rollout"].pid, signal.SIGKILL)
    assert run.wait(timeout=300) == 0, everburn.output

    config = read(folder / "out/config.json")
    assert (config["backend"], config["steps"], config["max_tokens"]) == ("emulator", 4, 6)
    run_id = config["run"]["id"]
    assert re.fullmatch(r"hud-\d{8}-\d{6}", run_id)
    ledger = read_ledger(ArtifactStore.of(RunRef.model_validate(config["run"])))

    found = metrics(folder)
    assert [metric["step"] for metric in found] == [1, 2, 3, 4]
    for metric, entry in zip(found, ledger, strict=True):
        assert (metric["rollouts"], metric["valid_rollouts"]) == (8, 8)
        assert metric["updated"] == entry.updated == (metric["kept_groups"] > 0)
        assert metric["training_datums"] == 4 * metric["kept_groups"]
        assert (metric["loss"] is None) == (not metric["updated"])
        assert metric["reward"] == entry.metrics["rollout/raw_reward"]
        assert metric["snapshot"]
        assert metric.keys() == {
            *("step", "reward", "reward_std_within_group", "rollouts", "valid_rollouts"),
            *("kept_groups", "training_datums", "updated", "loss", "snapshot", "seconds"),
        }
    assert not (folder / "out/eval-before.json").exists()
    after = read(folder / "out/eval-after.json")
    assert after.keys() == {"snapshot", "temperature", "max_tokens", "samples"}
    assert (after["temperature"], after["max_tokens"], len(after["samples"])) == (0.0, 6, 3)
    for sample in after["samples"]:
        assert sample["info"] == {"got": len(set(sample["answer"]))}
        assert sample["reward"] == sample["info"]["got"] % 2
    trained = {sample["prompt"] for sample in after["samples"]} & rows_of(ledger, config)
    assert not trained

    text = everburn.output
    assert (
        len(re.findall(r"^step 0\d/4 reward=\d\.\d{3} kept_groups=\d/2 datums=\d+", text, re.M))
        == 4
    )
    checkpoints = re.findall(r"^Training checkpoint: (\S+)$", text, re.M)
    assert [path.rpartition("/")[2] for path in checkpoints] == ["state-2", "state-4", "state-4"]
    assert re.search(r"^Evaluation reward=\d\.\d{3} on 3 held-out tasks$", text, re.M)
    assert f"Sampler checkpoint: {after['snapshot']}" in text
    assert everburn.processes() == []

    # The files can be made again from the run's own folder.
    before = found, after
    (folder / "out/metrics.jsonl").unlink()
    (folder / "out/eval-after.json").unlink()
    done = everburn("hud", "files", "out")
    assert done.returncode == 0, done.stderr
    assert (metrics(folder), read(folder / "out/eval-after.json")) == before


def rows_of(ledger: Any, config: dict[str, Any]) -> set[str]:
    rows = ArtifactStore.of(RunRef.model_validate(config["run"])).get("rows.jsonl").decode()
    found = {json.loads(line)["args"]["start"] for line in rows.splitlines()}
    assert len(found) == 2
    return found


def test_a_failed_rollout_ends_the_run_and_is_no_zero(everburn: Everburn, folder: Path) -> None:
    env = (folder / "mine/env.py").read_text().replace('text.startswith("{")', "True")
    (folder / "mine/env.py").write_text(env)
    done = everburn(*TRAIN, "--steps", "2")
    assert done.returncode == 1, done.stdout
    (line,) = re.findall(r"^\d+/8 rollouts failed during .*$", done.stdout, re.M)
    assert line.startswith("1/8 rollouts failed during policy-0001: ")
    assert "no judge today" in line
    assert metrics(folder) == []


def test_calibration_reports_spread_and_samples_and_touches_no_file(
    everburn: Everburn, folder: Path
) -> None:
    done = everburn(*TRAIN, "--calibrate", "--debug-samples", "2")
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert re.fullmatch(
        r"calibration: 8/8 rollouts completed reward_mean=\d\.\d{3} "
        r"within_group_reward_std=\d\.\d{3}",
        first,
    )
    samples = [
        line for line in others if re.fullmatch(r"--- reward=\d\.\d\d output_tokens=\d", line)
    ]
    assert len(samples) == 2
    assert not (folder / "out").exists()
    assert not (folder / "runs").exists()
    assert everburn.processes() == []
