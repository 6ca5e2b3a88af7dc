"""Whole trainings, as their READMEs and docs/hud.md show them: the held-out reward rises."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.command_line import ROOT, Everburn, free_ports

pytestmark = pytest.mark.chaos  # minutes each, on whole base models
PATIENCE = 3600.0
RISE = 0.1


@pytest.fixture
def everburn(tmp_path: Path) -> Iterator[Everburn]:
    """In a folder that is like the project's own, for examples that name files of theirs."""
    command = Everburn(tmp_path.resolve())
    (command.folder / "examples").symlink_to(ROOT / "examples")
    yield command
    command.close()


def trained(everburn: Everburn, *arguments: str) -> None:
    run = everburn.start(*arguments)
    assert run.wait(timeout=PATIENCE) == 0, everburn.told()


def samples(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Held-out completions before and after, on the same prompts and with the same parameters."""
    before, after = (
        json.loads((folder / f"eval-{when}.json").read_text()) for when in ("before", "after")
    )
    for key in ("temperature", "max_tokens"):
        assert before[key] == after[key]
    asked = [[sample["prompt"] for sample in each["samples"]] for each in (before, after)]
    assert asked[0] == asked[1] and len(asked[0]) >= 16
    return before["samples"], after["samples"]


def mean_reward(found: list[dict[str, Any]]) -> float:
    return sum(sample["reward"] for sample in found) / len(found)


@pytest.mark.parametrize("name", ["hud", "frozen_lake", "multihop_qa"])
def test_an_example_improves(everburn: Everburn, name: str) -> None:
    if name == "hud":
        pytest.importorskip("hud", reason="needs the extra: pip install 'everburn[hud]'")
    trained(everburn, "run", f"examples/{name}/run.json", *free_ports())
    before, after = samples(everburn.folder / "runs" / "latest")
    assert mean_reward(after) >= mean_reward(before) + RISE, everburn.output


def test_the_recipe_improves_on_the_emulator(everburn: Everburn) -> None:
    pytest.importorskip("hud", reason="needs the extra: pip install 'everburn[hud]'")
    trained(everburn, "hud", "train", "--backend", "emulator", "--eval-before")
    folder = everburn.folder / "runs" / "fireworks-serverless"
    before, after = samples(folder)
    assert mean_reward(after) >= mean_reward(before) + RISE, everburn.output
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 15
