"""HUD tasks as rows: sources, the split, and errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from hud.eval import Task, Taskset

from everburn.hud.package import HUD_KEY_ENV, import_hud
from everburn.hud.tasks import rows
from everburn.rollouts.dataset import DatasetError
from support.hud_runs import COUNTING


def arithmetic(**kwargs: Any) -> dict[str, Any]:
    return {"name": "examples.arithmetic.hud_environment:tasks", "kwargs": kwargs}


PRODUCTS = arithmetic(template="multiply", a=[10, 99], b=[10, 99])


def parts(**source: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    first, second = (rows(part=part, **source) for part in ("training", "held_out"))  # type: ignore[arg-type]
    return first, second


def test_bundled_tasks_are_disjoint_unique_and_deterministic() -> None:
    training, held_out = parts(function=PRODUCTS, training=5, held_out=3, seed=7)
    assert (len(training), len(held_out)) == (5, 3)
    pairs = {(row["args"]["a"], row["args"]["b"]) for row in training + held_out}
    assert len(pairs) == 8
    assert all(10 <= number <= 99 for pair in pairs for number in pair)
    assert (training, held_out) == parts(function=PRODUCTS, training=5, held_out=3, seed=7)
    assert training != rows(part="training", function=PRODUCTS, training=5, held_out=3, seed=8)


def test_all_pairs_can_be_used_and_no_more() -> None:
    four = arithmetic(template="add", a=[1, 2], b=[1, 2])
    training, held_out = parts(function=four, training=3, held_out=1)
    assert len({json.dumps(row["args"]) for row in training + held_out}) == 4
    with pytest.raises(DatasetError, match=r"5 arithmetic tasks are needed.* only 4 unique pairs"):
        rows(part="training", function=four, training=5, held_out=0)


def test_a_python_file_of_tasks_is_split_after_a_shuffle() -> None:
    training, held_out = parts(tasks_file=str(COUNTING / "tasks.py"), training=4, held_out=8)
    starts = [row["args"]["start"] for row in training + held_out]
    assert sorted(starts) == list("abcdefghijkl")
    assert starts != sorted(starts)


def test_modules_of_equal_names_in_two_folders_are_not_mixed_up(tmp_path: Path) -> None:
    """Both folders have an `env.py`, and a `tasks.py` that imports it by its bare name."""
    (tmp_path / "env.py").write_text(
        "from hud import Environment\n"
        "env = Environment(name='other')\n"
        "@env.template()\n"
        "async def other(n: int):\n"
        "    yield 'ab'\n"
        "    yield 1.0\n"
    )
    (tmp_path / "tasks.py").write_text("from env import other\ntasks = [other(n=1), other(n=2)]\n")
    for _ in range(2):
        first, _ = parts(tasks_file=str(COUNTING / "tasks.py"), training=12, held_out=0)
        second, _ = parts(tasks_file=str(tmp_path / "tasks.py"), training=2, held_out=0)
        assert {row["id"] for row in first} == {"variety"}
        assert {row["id"] for row in second} == {"other"}


def test_a_row_is_the_task_that_hud_writes(tmp_path: Path) -> None:
    tasks = [Task(env="counting", id="variety", args={"start": start}) for start in "abc"]
    path = Taskset("letters", tasks).to_file(tmp_path / "tasks.jsonl")
    training, _ = parts(tasks_file=str(path), training=3, held_out=0)
    assert sorted(row["slug"] for row in training) == sorted(task.slug for task in tasks)
    assert {Task.model_validate(row).slug for row in training} == {task.slug for task in tasks}


def test_too_few_tasks_are_refused_with_all_numbers() -> None:
    with pytest.raises(DatasetError, match=r"has 12 tasks, but 13 are needed: 8 .* and 5 held out"):
        parts(tasks_file=str(COUNTING / "tasks.py"), training=8, held_out=5)


def test_tasks_of_one_slug_are_refused(tmp_path: Path) -> None:
    task = {"env": "counting", "id": "variety", "args": {"start": "a"}}
    (tmp_path / "twice.json").write_text(json.dumps([task, task]))
    with pytest.raises(DatasetError, match="duplicate task slugs"):
        parts(tasks_file=str(tmp_path / "twice.json"), training=1, held_out=1)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("tasks.py", "raise SystemExit(3)", "SystemExit: 3"),
        ("tasks.py", "tasks = []", "holds no HUD tasks"),
        ("tasks.txt", "", "unsupported taskset source"),
        ("tasks.json", "{", "JSONDecodeError"),
        ("tasks.json", '[{"env": "counting"}]', "id"),
    ],
)
def test_a_file_without_tasks_is_refused_with_the_reason(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DatasetError, match=complaint):
        parts(tasks_file=str(tmp_path / name), training=1, held_out=1)


def test_exactly_one_source_is_required() -> None:
    with pytest.raises(DatasetError, match="name one source"):
        parts(training=1, held_out=1)
    with pytest.raises(DatasetError, match="name one source"):
        parts(function=PRODUCTS, taskset="mine", training=1, held_out=1)


def test_a_hosted_set_needs_the_key_and_sends_nothing_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requested: list[str] = []
    # Replaces HUD's platform, which is not available here.
    monkeypatch.setattr(Taskset, "from_api", classmethod(lambda cls, name: requested.append(name)))
    with pytest.raises(
        DatasetError, match=f"task set 'mine' needs a key of the HUD platform: set {HUD_KEY_ENV}"
    ):
        parts(taskset="mine", training=1, held_out=1)
    assert requested == []


def test_a_hosted_set_is_split_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Taskset("mine", [Task(env="e", id="t", args={"n": n}) for n in range(6)])
    monkeypatch.setenv(HUD_KEY_ENV, "sk-hud-test")
    import_hud()
    monkeypatch.setattr(Taskset, "from_api", classmethod(lambda cls, name: source))
    training, held_out = parts(taskset="mine", training=4, held_out=2)
    assert sorted(row["args"]["n"] for row in training + held_out) == list(range(6))
