import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from everburn.records.ids import RunRef
from everburn.records.keys import CONFIG_KEY
from everburn.records.store import ArtifactStore
from workers.cli.run_file import (
    RunFile,
    check_run_id,
    find_run_folder,
    link_latest,
    load_run_file,
    new_run_id,
)
from workers.errors import BadInputError

CONFIG = {
    "rollout": "task:make_rollout_fn",
    "dataset": "rows.jsonl",
    "base_model": "tiny",
    "backend": "emulator",
}


def written(path: Path, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(CONFIG | changes))
    return path


def load(path: Path, *assignments: str, folder: Path = Path("/here")) -> RunFile:
    return load_run_file(path, list(assignments), folder)


def test_dataset_paths_are_relative_to_the_file_and_the_store_to_the_current_folder(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "tasks" / "sums.json", evaluation_dataset="held-out.jsonl")
    file = load(path)
    assert file.values["dataset"] == str(tmp_path / "tasks" / "rows.jsonl")
    assert file.config.evaluation_dataset == str(tmp_path / "tasks" / "held-out.jsonl")
    assert file.config.store == "/here/runs"


def test_an_assigned_dataset_path_is_relative_to_the_current_folder(tmp_path: Path) -> None:
    file = load(written(tmp_path / "sums.json"), "dataset=other.jsonl")
    assert file.config.dataset == "/here/other.jsonl"


def test_urls_functions_and_absolute_paths_are_unchanged(tmp_path: Path) -> None:
    path = written(
        tmp_path / "sums.json",
        dataset={"name": "task:rows"},
        evaluation_dataset="s3://bucket/rows.jsonl",
        store="gs://bucket/runs",
    )
    file = load(path)
    assert file.values["dataset"] == {"name": "task:rows"}
    assert file.config.evaluation_dataset == "s3://bucket/rows.jsonl"
    assert file.config.store == "gs://bucket/runs"


def test_set_parses_json_and_else_takes_text(tmp_path: Path) -> None:
    file = load(
        written(tmp_path / "sums.json", prepare_batch="everburn.learning.igpo:prepare_batch"),
        "epochs=3",
        "learning_rate=2e-4",
        "shuffle=false",
        "max_rows=null",
        "extras.operator=plus",
        "extras.limits.low=2",
        "base_model=other",
        "rollout.kwargs.style=short",
        "prepare_batch.kwargs.gamma=0.9",
    )
    assert file.config.rollout.kwargs == {"style": "short"}
    assert file.config.prepare_batch is not None
    assert file.config.prepare_batch.kwargs == {"gamma": 0.9}
    assert (file.config.epochs, file.config.learning_rate, file.config.shuffle) == (3, 2e-4, False)
    assert file.config.max_rows is None
    assert file.config.extras == {"operator": "plus", "limits": {"low": 2}}
    assert file.config.base_model == "other"


@pytest.mark.parametrize(
    ("assignment", "error"),
    [
        ("epochs", "write path=value"),
        ("=3", "write path=value"),
        ("extras..a=3", "write path=value"),
        ("base_model.size=3", "base_model isn't an object"),
        ("epocs=3", "did you mean epochs"),
    ],
)
def test_invalid_assignments_are_rejected(tmp_path: Path, assignment: str, error: str) -> None:
    with pytest.raises(BadInputError, match=error):
        load(written(tmp_path / "sums.json"), assignment)


def test_all_problems_of_a_configuration_are_reported_at_once(tmp_path: Path) -> None:
    path = written(tmp_path / "sums.json", epocs=3, completions_per_prompt=1)
    with pytest.raises(BadInputError) as caught:
        load(path)
    text = str(caught.value)
    assert str(path) in text
    assert "epocs: no such field" in text
    assert "completions_per_prompt:" in text


def test_broken_json_is_reported_by_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "sums.json"
    path.write_text('{\n "epochs": }')
    with pytest.raises(BadInputError, match=r"sums\.json:2:12: not valid JSON"):
        load(path)
    path.write_text("[]")
    with pytest.raises(BadInputError, match="contains a JSON list"):
        load(path)
    with pytest.raises(BadInputError, match="No such file"):
        load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("sums.json", "sums"),
        ("arithmetic/run.json", "arithmetic"),
        ("arithmetic/run.fireworks.json", "arithmetic.fireworks"),
        ("my task/two digits.json", "two-digits"),
    ],
)
def test_a_run_is_named_after_its_file(tmp_path: Path, path: str, name: str) -> None:
    assert load(written(tmp_path / path)).name == name


def test_run_ids_are_unique_in_a_store(tmp_path: Path) -> None:
    now = datetime(2026, 3, 4, 5, 6, 7)
    assert new_run_id("sums", str(tmp_path), now) == "sums-20260304-050607"
    (tmp_path / "sums-20260304-050607").mkdir()
    assert new_run_id("sums", str(tmp_path), now) == "sums-20260304-050607-2"


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", "-x", "two words", "x" * 129])
def test_a_run_id_must_be_able_to_name_a_folder(run_id: str) -> None:
    with pytest.raises(BadInputError, match="isn't a valid run id"):
        check_run_id(run_id)


def test_latest_points_to_the_newest_run(tmp_path: Path) -> None:
    store = tmp_path / "runs"
    for run_id in ("first", "second"):
        link_latest(str(store), run_id)
        (store / run_id).mkdir()
        assert (store / "latest").resolve() == store / run_id
    assert sorted(entry.name for entry in store.iterdir()) == ["first", "latest", "second"]


def test_a_run_is_found_by_its_id_its_folder_or_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs, bucket = str(tmp_path / "runs"), f"memory://bucket/{tmp_path.name}"
    for store in (runs, bucket):
        ArtifactStore.of(RunRef(store=store, id="first")).put_json(CONFIG_KEY, {})
    link_latest(runs, "first")
    here = RunRef(store=runs, id="first")
    for name in ("first", "latest", "runs/first", "runs/first/", f"{runs}/first"):
        assert find_run_folder(name, tmp_path) == here
    by_url = RunRef(store=f"file://{runs}", id="first")
    assert find_run_folder(f"file://{runs}/first", tmp_path) == by_url
    for name in (f"{bucket}/first", f"{bucket}/first/"):
        assert find_run_folder(name, tmp_path) == RunRef(store=bucket, id="first")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("second", "there is no run in {here}/runs/second: give its id in {here}/runs"),
        ("memory://bucket/second", "there is no run in memory://bucket/second: give"),
        ("nowhere://bucket/second", "nowhere://bucket/second: Protocol not known: nowhere"),
        ("absent://bucket/runs/second", "absent://bucket/runs/second: Install absentfs"),
    ],
)
@pytest.mark.usefixtures("uninstalled_store")
def test_a_missing_run_is_named(tmp_path: Path, name: str, error: str) -> None:
    with pytest.raises(BadInputError) as caught:
        find_run_folder(name, tmp_path)
    assert error.format(here=tmp_path) in str(caught.value)
