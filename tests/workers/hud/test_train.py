"""`everburn hud train` as a user sees it, on the emulator's tiny base model."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from everburn.emulator.models.base_model import TINY
from everburn.learning.group import load_group
from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import RunRef
from everburn.records.keys import rollout_key
from everburn.records.ledger import LedgerEntry, read_ledger
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore
from support.command_line import Everburn, wait_until
from workers.stack.folder import StackFolder

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


def metrics(folder: Path, out: str = "out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_loses_its_rollout_worker_writes_the_recipes_files(
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
    store = ArtifactStore.of(RunRef.model_validate(config["run"]))
    ledger = read_ledger(store)

    found = metrics(folder)
    assert [metric["step"] for metric in found] == [1, 2, 3, 4]
    for metric, entry in zip(found, ledger, strict=True):
        assert (metric["rollouts"], metric["valid_rollouts"]) == (8, 8)
        assert metric["updated"] == entry.updated == (metric["kept_groups"] > 0)
        assert metric["training_datums"] == 4 * metric["kept_groups"]
        assert (metric["loss"] is None) == (not metric["updated"])
        assert metric["reward"] == entry.metrics["rollout/raw_reward"]
        assert metric["snapshot"] == f"policy-{entry.step:04d}"
        assert re.fullmatch(r"policy-\d{4}-e\d+-\w+", metric["snapshot_path"].rpartition("/")[2])
        assert metric.keys() == {
            *("step", "reward", "reward_std_within_group", "rollouts", "valid_rollouts"),
            *("kept_groups", "training_datums", "updated", "loss", "snapshot", "seconds"),
            "snapshot_path",
        }
        if entry.updated:
            assert metric["loss"] == pytest.approx(loss_over_all_tokens(store, entry))
    assert not (folder / "out/eval-before.json").exists()
    after = read(folder / "out/eval-after.json")
    assert after.keys() == {"snapshot", "snapshot_path", "temperature", "max_tokens", "samples"}
    assert after["snapshot"] == "final"
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
    checkpoints = dict(re.findall(r"^Training checkpoint: (\S+) \((.+)\)$", text, re.M))
    assert list(checkpoints.values()) == ["state-0002", "state-0004, final-state"]
    assert [path.rpartition("/")[2] for path in checkpoints] == ["state-2", "state-4"]
    assert all(text.count(path) == 1 for path in checkpoints)
    assert re.search(r"^Evaluation reward=\d\.\d{3} on 3 held-out tasks$", text, re.M)
    assert f"Sampler checkpoint: {after['snapshot_path']} (final)" in text
    assert everburn.processes() == []

    # The files can be made again from the run's own folder.
    before = found, after
    (folder / "out/metrics.jsonl").unlink()
    (folder / "out/eval-after.json").unlink()
    done = everburn("hud", "files", "out")
    assert done.returncode == 0, done.stderr
    assert (metrics(folder), read(folder / "out/eval-after.json")) == before


def loss_over_all_tokens(store: ArtifactStore, entry: LedgerEntry) -> float:
    """The step's loss, divided by the number of tokens sent to be trained, including prompts."""
    sent = trained = 0
    for key in entry.groups:
        for member in load_group(store, key).members:
            if member.advantage:
                for segment in read_rollout(store, rollout_key(key, member.completion))[1].segments:
                    # The last token predicts none.
                    sent += len(segment.tokens) - 1
                    trained += sum(segment.loss_mask)
    assert sent > trained == entry.metrics["train/tokens"]
    return entry.metrics["train/loss"] * trained / sent


def rows_of(ledger: Any, config: dict[str, Any]) -> set[str]:
    rows = ArtifactStore.of(RunRef.model_validate(config["run"])).get("rows.jsonl").decode()
    found = {json.loads(line)["args"]["start"] for line in rows.splitlines()}
    assert len(found) == 2
    return found


def test_calibration_reports_spread_and_samples_and_writes_no_file(
    everburn: Everburn, folder: Path
) -> None:
    (folder / "out").mkdir()
    for name in ("config.json", "metrics.jsonl", "eval-before.json", "eval-after.json"):
        (folder / "out" / name).write_text(f"{name} of a run\n")
    before = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
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
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == before
    assert not (folder / "runs").exists()
    assert everburn.processes() == []


@pytest.fixture
def stack(shared_stack: Everburn) -> Everburn:
    """A folder whose services keep running, for runs that differ in their environments only."""
    return shared_stack


def train(stack: Everburn, name: str, env: str, *more: str, out: str) -> tuple[int, str]:
    """Train one step in the given environment; returns the exit code and the output."""
    mine = stack.folder / name
    mine.mkdir()
    (mine / "env.py").write_text(env)
    (mine / "tasks.py").write_text(TASKS)
    places = ("--tasks-file", f"{name}/tasks.py", "--env-path", f"{name}/env.py")
    done = stack(*TRAIN, *places, "--steps", "1", "--output-dir", out, *more)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


FLAT = ENV.replace("reward=float(got % 2)", "reward=1.0")
SPREAD = ENV.replace("reward=float(got % 2)", "reward=sum(map(ord, text)) % 101 / 101")


@pytest.mark.chaos
def test_a_run_without_update_and_a_run_that_starts_from_it(stack: Everburn) -> None:
    more = ("--eval-before", "--checkpoint-every", "1")
    code, text = train(stack, "flat", FLAT, *more, out="out")
    assert code == 0, text
    (first,) = metrics(stack.folder)
    assert (first["updated"], first["kept_groups"], first["loss"]) == (False, 0, None)
    assert "kept_groups=0/2 datums=0 updated=False loss=n/a" in text

    # Saved even without an update, and printed once.
    ((path, name),) = re.findall(r"^Training checkpoint: (\S+) \((.+)\)$", text, re.M)
    assert (path.rpartition("/")[2], name) == ("state-1", "state-0001, final-state")
    assert text.count(path) == 1

    # Before and after: the same tasks and parameters, and here the same weights.
    before, after = (read(stack.folder / f"out/eval-{when}.json") for when in ("before", "after"))
    assert (before["snapshot"], after["snapshot"]) == ("initial", "final")
    assert before["snapshot_path"] == after["snapshot_path"]
    for key in ("temperature", "max_tokens", "samples"):
        assert before[key] == after[key]
    assert (before["temperature"], before["max_tokens"], len(before["samples"])) == (0.0, 6, 3)
    assert len({sample["prompt"] for sample in before["samples"]}) == 3
    for line in (
        r"before +after",
        r"correct +3 \(100\.0%\) +3 \(100\.0%\)",
        r"at the token limit +\d \(\d+\.\d%\) +\d \(\d+\.\d%\)",
        r"wrong +0 \(0\.0%\) +0 \(0\.0%\)",
        r"invalid +0 \(0\.0%\) +0 \(0\.0%\)",
        r"mean output tokens +[\d.]+ +[\d.]+",
    ):
        assert re.search(line, text), line

    more = ("--resume-from", path, "--require-update")
    code, text = train(stack, "spread", SPREAD, *more, out="out")
    assert code == 0, text
    config = read(stack.folder / "out/config.json")
    run = RunRef.model_validate(config["run"])
    assert (config["resume_from"], stored_config(run).init_from_checkpoint) == (path, path)
    assert not (stack.folder / "out/eval-before.json").exists()
    found = metrics(stack.folder)
    assert found[0] == first
    assert [metric["updated"] for metric in found] == [False, True]
    assert stack("hud", "files", "out").returncode == 0
    assert metrics(stack.folder) == found


@pytest.mark.chaos  # a whole run
def test_a_step_without_spread_is_an_error_if_an_update_is_required(stack: Everburn) -> None:
    code, text = train(stack, "required", FLAT, "--require-update", out="required-out")
    assert code == 1
    assert "step 1: all completions of each row got the same reward" in text
    assert (stack.folder / "required-out/metrics.jsonl").read_text() == ""
    assert not (stack.folder / "required-out/eval-after.json").exists()


@pytest.mark.chaos
def test_the_final_state_is_saved_before_the_final_evaluation(stack: Everburn) -> None:
    from everburn.hud.tasks import rows

    (stack.folder / "probe").mkdir()
    for name, text in (("env.py", ENV), ("tasks.py", TASKS)):
        (stack.folder / "probe" / name).write_text(text)
    source = {"tasks_file": str(stack.folder / "probe/tasks.py"), "training": 2, "held_out": 3}
    held_out = [row["args"]["start"] for row in rows(part="held_out", seed=0, **source)]
    broken = ENV.replace('text.startswith("{")', f"start in {held_out}")
    code, text = train(stack, "broken", broken, out="broken-out")
    assert code == 1
    (line,) = re.findall(r"^\d+/\d+ rollouts failed during .*$", text, re.M)
    assert line.startswith("3/3 rollouts failed during final: ")
    assert "no judge today" in line
    assert re.search(r"^Training checkpoint: \S+/state-1 \(final-state\)$", text, re.M)
    assert [metric["step"] for metric in metrics(stack.folder, "broken-out")] == [1]
    assert not (stack.folder / "broken-out/eval-after.json").exists()


def test_a_failed_rollout_ends_the_run_and_is_not_scored_zero(stack: Everburn) -> None:
    env = ENV.replace('text.startswith("{")', "True")
    code, text = train(stack, "failing", env, "--steps", "2", out="failing-out")
    assert code == 1, text
    (line,) = re.findall(r"^\d+/8 rollouts failed during .*$", text, re.M)
    assert line.startswith("8/8 rollouts failed during policy-0001: ")
    assert "no judge today" in line
    assert metrics(stack.folder, "failing-out") == []


@pytest.mark.chaos
def test_a_run_continues_without_its_output_folder(stack: Everburn) -> None:
    """The link `latest` isn't needed either."""
    mine = stack.folder / "beside"
    mine.mkdir()
    (mine / "env.py").write_text(ENV)
    (mine / "tasks.py").write_text(TASKS)
    out, away = stack.folder / "lost-out", stack.folder / "away"
    latest = stack.folder / "runs" / "latest"
    latest.unlink(missing_ok=True)
    latest.mkdir(parents=True)
    places = ("--tasks-file", "beside/tasks.py", "--env-path", "beside/env.py")
    run = stack.start(*TRAIN, *places, "--steps", "1", "--output-dir", "lost-out")
    try:
        wait_until(lambda: "run hud-" in stack.output, "the run to start")
        out.rename(away)
        assert run.wait(timeout=240) == 0, stack.output
    finally:
        latest.rmdir()
    assert "`latest` doesn't name this run: " in stack.output
    problem = "the files in lost-out aren't up to date: "
    lines = stack.output.splitlines()
    assert [line.startswith(problem) for line in lines].count(True) == 2, stack.output
    assert lines[-1].startswith("run folder: ")
