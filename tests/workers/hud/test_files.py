"""The recipe's output folder and printed lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from everburn.records.checkpoints import Checkpoint, record_checkpoint
from everburn.records.ids import RunRef
from everburn.records.ledger import LedgerEntry, commit
from everburn.records.store import ArtifactStore
from everburn.rollouts.evaluation import AFTER_KEY, EvaluationReport, EvaluationSample
from support.sessions import ADAM
from workers.errors import BadInputError, UserError
from workers.hud import cli
from workers.hud.files import RecipeFiles, TolerantFiles
from workers.hud.recipe import HudOptions
from workflows.messages import RolloutsFailed


def files(tmp_path: Path, **given: Any) -> RecipeFiles:
    run = RunRef(store=str(tmp_path / "runs"), id="hud-1")
    return RecipeFiles(HudOptions.model_validate(given), run, tmp_path / "out")


def fill(folder: Path) -> None:
    """The files of an earlier run."""
    folder.mkdir()
    for name in ("metrics.jsonl", "eval-before.json", "eval-after.json"):
        (folder / name).write_text('{"step": 1}\n')


def test_a_run_starts_with_a_clean_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREWORKS_API_KEY", "fw_secret")
    fill(tmp_path / "out")
    files(tmp_path, eval_before=True).begin()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "metrics.jsonl"}
    assert (tmp_path / "out/metrics.jsonl").read_text() == ""
    text = (tmp_path / "out/config.json").read_text()
    config = json.loads(text)
    assert config["run"] == {"store": str(tmp_path / "runs"), "id": "hud-1"}
    assert config.keys() == {*HudOptions.model_fields, "run", "metrics_offset"}
    assert (config["eval_before"], config["steps"]) == (True, 30)
    assert "fw_secret" not in text


def test_a_run_from_a_checkpoint_appends_to_the_metrics(tmp_path: Path) -> None:
    fill(tmp_path / "out")
    files(tmp_path, resume_from="everburn/run-1/state-4").begin()
    assert (tmp_path / "out/metrics.jsonl").read_text() == '{"step": 1}\n'
    assert not (tmp_path / "out/eval-before.json").exists()


def test_an_output_folder_can_be_opened_again(tmp_path: Path) -> None:
    files(tmp_path, steps=3).begin()
    assert RecipeFiles.open(tmp_path / "out").run.id == "hud-1"
    with pytest.raises(BadInputError, match="isn't the output folder"):
        RecipeFiles.open(tmp_path)


def test_write_errors_are_reported_without_a_traceback(tmp_path: Path) -> None:
    files(tmp_path).begin()
    metrics = tmp_path / "out/metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    with pytest.raises(UserError, match=f"can't write the files in {tmp_path / 'out'}: "):
        cli.files(tmp_path / "out")


def test_huds_own_record_is_not_in_the_output_folder(tmp_path: Path) -> None:
    found = files(tmp_path)
    found.begin()
    sample = EvaluationSample(
        prompt="2+2=",
        reward=1.0,
        info={"got": 4, "hud": {"steps": []}},
        answer="4",
        output_tokens=2,
        at_token_limit=False,
    )
    report = EvaluationReport(snapshot="s", temperature=0.0, max_tokens=9, samples=[sample])
    store = ArtifactStore.of(RunRef(store=str(tmp_path / "runs"), id="hud-1"))
    store.put_json(AFTER_KEY, report.model_dump(mode="json"))
    lines = list(found.epilogue(None, None))
    written = json.loads((tmp_path / "out/eval-after.json").read_text())
    assert written["samples"][0]["info"] == {"got": 4}
    assert (written["snapshot"], written["snapshot_path"]) == ("final", "s")
    assert lines[:2] == [
        "Evaluation reward=1.000 on 1 held-out tasks",
        "Sampler checkpoint: s (final)",
    ]


@pytest.mark.parametrize(
    ("failed", "eval_before", "line"),
    [
        (
            RolloutsFailed(version=0, evaluation=False, failed=5, first="no judge"),
            True,
            "5/64 rollouts failed during policy-0001: no judge",
        ),
        (
            RolloutsFailed(version=6, evaluation=False, failed=64, first="no judge"),
            False,
            "64/64 rollouts failed during policy-0007: no judge",
        ),
        (
            RolloutsFailed(version=0, evaluation=True, failed=1, first="no judge"),
            True,
            "1/16 rollouts failed during initial: no judge",
        ),
        (
            RolloutsFailed(version=30, evaluation=True, failed=16, first="no judge"),
            True,
            "16/16 rollouts failed during final: no judge",
        ),
        (
            # Stopped before its first step.
            RolloutsFailed(version=0, evaluation=True, failed=2, first="no judge"),
            False,
            "2/16 rollouts failed during final: no judge",
        ),
    ],
)
def test_failed_rollouts_are_reported_with_their_phase(
    tmp_path: Path, failed: RolloutsFailed, eval_before: bool, line: str
) -> None:
    found = files(tmp_path, eval_before=eval_before)
    found.begin()
    assert line in found.epilogue(None, failed)
    assert not any("rollouts failed" in text for text in found.epilogue(None, None))


def commit_steps(tmp_path: Path, count: int, **changes: Any) -> None:
    """A ledger of steps that have trained."""
    store = ArtifactStore.of(RunRef(store=str(tmp_path / "runs"), id="hud-1"))
    for step in range(1, count + 1):
        metrics: dict[str, float | int | bool] = {
            "rollout/raw_reward": 0.5,
            "rollout/raw_samples": 64,
            "rollout/reward_std_within_group": 0.25,
            "rollout/kept_groups": 8,
            "rollout/datums": 64,
            "train/loss": -0.5,
            "train/tokens": 30,
            "train/total_tokens": 120.0,
        }
        entry = LedgerEntry(
            step=step,
            version=step,
            incarnation=0,
            lease_epoch=1,
            attempts=1,
            updated=True,
            groups=["0", "1"],
            digests=["a", "b"],
            submissions=[],
            loss="importance_sampling",
            loss_config={},
            adam=ADAM,
            snapshot=f"policy-{step:04d}-e1",
            checkpoint=f"everburn/run-1/state-{step}" if step % 2 == 0 else None,
            seconds=1.0,
            metrics={name: v for name, v in (metrics | changes).items() if v is not None},
        )
        commit(store, entry)


def test_a_full_disk_is_reported_once_and_the_missing_lines_are_written_later(
    tmp_path: Path,
) -> None:
    found = files(tmp_path)
    found.begin()
    tolerant = TolerantFiles(found, "out")
    commit_steps(tmp_path, 1)
    assert len(tolerant.news()) == 1

    path, away = tmp_path / "out/metrics.jsonl", tmp_path / "away"
    path.rename(away)
    path.symlink_to("/dev/full")
    commit_steps(tmp_path, 2)
    (problem,) = tolerant.news()
    assert problem.startswith("the files in out aren't up to date: ")
    assert "No space left on device" in problem
    assert "`everburn hud files out` writes them again" in problem
    assert tolerant.news() == []
    assert tolerant.epilogue(None, None) == [problem]

    path.unlink()
    away.rename(path)
    with path.open("a") as file:
        file.write('{"cut off')
    commit_steps(tmp_path, 3)
    lines = tolerant.news()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["02/30", "03/30"]
    assert metric_steps(tmp_path / "out") == [1, 2, 3]


def metric_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


def test_lines_of_a_resumed_run_are_written_again_after_those_of_the_earlier_run(
    tmp_path: Path,
) -> None:
    fill(tmp_path / "out")
    found = files(tmp_path, resume_from="everburn/run-0/state-1")
    found.begin()
    commit_steps(tmp_path, 2)
    list(found.news())
    for _ in range(2):
        assert metric_steps(tmp_path / "out") == [1, 1, 2]
        list(RecipeFiles.open(tmp_path / "out").epilogue(None, None))
    # A file that was removed has lost its earlier lines.
    (tmp_path / "out/metrics.jsonl").unlink()
    for _ in range(2):
        list(RecipeFiles.open(tmp_path / "out").epilogue(None, None))
        assert metric_steps(tmp_path / "out") == [1, 2]


def test_the_loss_is_per_sent_token(tmp_path: Path) -> None:
    found = files(tmp_path, steps=4)
    found.begin()
    commit_steps(tmp_path, 1)
    (line,) = found.news()
    # loss:sum is -0.5 for each of 30 trained tokens; 120 were sent.
    assert "reward=0.500" in line and "loss=-0.125" in line
    (metric,) = map(json.loads, (tmp_path / "out/metrics.jsonl").open())
    assert metric["loss"] == -0.125
    assert (metric["snapshot"], metric["reward"]) == ("policy-0001", 0.5)


def test_unknown_values_are_null_not_zero(tmp_path: Path) -> None:
    found = files(tmp_path, steps=4)
    found.begin()
    commit_steps(tmp_path, 1, **{"rollout/raw_reward": None, "train/total_tokens": None})
    (line,) = found.news()
    assert "reward=n/a" in line and "loss=n/a" in line
    (metric,) = map(json.loads, (tmp_path / "out/metrics.jsonl").open())
    assert (metric["reward"], metric["loss"]) == (None, None)


@pytest.mark.parametrize(
    ("steps", "names"),
    [
        (3, ["state-2 (state-0002)", "state-3 (final-state)"]),
        (4, ["state-2 (state-0002)", "state-4 (state-0004, final-state)"]),
    ],
)
def test_no_checkpoint_is_printed_twice(tmp_path: Path, steps: int, names: list[str]) -> None:
    saved = Checkpoint(
        step=steps,
        version=steps,
        path=f"everburn/run-1/state-{steps}",
        incarnation=0,
        lease_epoch=1,
        base_model="m",
        lora_rank=8,
        adapter_seed=0,
    )
    record_checkpoint(ArtifactStore.of(RunRef(store=str(tmp_path / "runs"), id="hud-1")), saved)
    found = files(tmp_path, steps=steps)
    found.begin()
    commit_steps(tmp_path, steps)
    lines = [*found.news(), *found.epilogue(None, None)]
    checkpoints = [line for line in lines if line.startswith("Training checkpoint: ")]
    assert checkpoints == [f"Training checkpoint: everburn/run-1/{name}" for name in names]
