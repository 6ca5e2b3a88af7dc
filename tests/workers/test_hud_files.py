"""The recipe's output folder: what begins it, and what is said at the end."""

import json
from pathlib import Path
from typing import Any

import pytest

from everburn.evaluation import AFTER_KEY, EvaluationReport, EvaluationSample
from everburn.refs import RunRef
from everburn.store import ArtifactStore
from workers.errors import BadInputError
from workers.hud_files import RecipeFiles
from workers.hud_recipe import HudOptions

GIVEN = {
    "backend": "fireworks",
    "temperature": 1.0,
    "sampling_timeout": 600.0,
    "checkpoint_every": 5,
    "seed": 0,
    "output_dir": "out",
    "eval_before": False,
    "loss_fn": "importance_sampling",
    "calibrate": False,
    "require_update": False,
    "debug_samples": 0,
}


def files(tmp_path: Path, **given: Any) -> RecipeFiles:
    run = RunRef(store=str(tmp_path / "runs"), id="hud-1")
    return RecipeFiles(HudOptions.of(GIVEN | given), run, tmp_path / "out")


def fill(folder: Path) -> None:
    """What an earlier run has left."""
    folder.mkdir()
    for name in ("metrics.jsonl", "eval-before.json", "eval-after.json"):
        (folder / name).write_text('{"step": 1}\n')


def test_a_run_begins_with_a_clean_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREWORKS_API_KEY", "fw_secret")
    fill(tmp_path / "out")
    files(tmp_path, eval_before=True).begin()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "metrics.jsonl"}
    assert (tmp_path / "out/metrics.jsonl").read_text() == ""
    text = (tmp_path / "out/config.json").read_text()
    config = json.loads(text)
    assert config["run"] == {"store": str(tmp_path / "runs"), "id": "hud-1"}
    assert config.keys() == {*HudOptions.__dataclass_fields__, "run"}
    assert (config["eval_before"], config["steps"]) == (True, 30)
    assert "fw_secret" not in text


def test_a_run_from_a_checkpoint_adds_to_the_metrics(tmp_path: Path) -> None:
    fill(tmp_path / "out")
    files(tmp_path, resume_from="everburn/run-1/state-4").begin()
    assert (tmp_path / "out/metrics.jsonl").read_text() == '{"step": 1}\n'
    assert not (tmp_path / "out/eval-before.json").exists()


def test_an_output_folder_is_found_again(tmp_path: Path) -> None:
    files(tmp_path, steps=3).begin()
    assert RecipeFiles.open(tmp_path / "out").run.id == "hud-1"
    with pytest.raises(BadInputError, match="isn't the output folder"):
        RecipeFiles.open(tmp_path)


def test_hud_keeps_its_record_to_the_runs_folder(tmp_path: Path) -> None:
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
    lines = found.epilogue(None, None)
    written = json.loads((tmp_path / "out/eval-after.json").read_text())
    assert written["samples"][0]["info"] == {"got": 4}
    assert lines[:2] == ["Evaluation reward=1.000 on 1 held-out tasks", "Sampler checkpoint: s"]


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (
            "RolloutFailed: row 3 · completion 2 failed, and on_any_rollout_failure is 'fail': "
            "HudRunFailedError: no judge",
            "1/64 rollouts failed during policy-0001: HudRunFailedError: no judge",
        ),
        (
            "RolloutFailed: the evaluation of version 0 failed, and on_any_rollout_failure is "
            "'fail': no judge",
            "1/16 rollouts failed during initial: no judge",
        ),
        (
            "RolloutFailed: the evaluation of version 30 failed, and on_any_rollout_failure is "
            "'fail': no judge",
            "1/16 rollouts failed during final: no judge",
        ),
    ],
)
def test_a_failed_rollout_is_told_with_its_phase(tmp_path: Path, failure: str, line: str) -> None:
    found = files(tmp_path)
    found.begin()
    assert line in found.epilogue(None, failure)
    assert not any("rollouts failed" in text for text in found.epilogue(None, "Other: error"))
