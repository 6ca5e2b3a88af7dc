"""Executes the code of docs/hud.md and examples/hud."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from everburn.config import parse_config
from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import GroupKey
from everburn.records.keys import rollout_key
from everburn.usercode.entrypoints import call
from support.hud_runs import ENV, Runs, a_task

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hud.md").read_text()
EXAMPLE = ROOT / "examples" / "hud"


def block(language: str) -> str:
    (only,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
    return str(only)


async def test_the_agent_of_several_turns(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent_of_the_docs.py").write_text(block("python"))
    monkeypatch.syspath_prepend(str(tmp_path))
    runner = await runs.runner(
        [a_task("variety", start="ab")], env_path=ENV, agent="agent_of_the_docs:make_agent"
    )
    await runner.complete(GroupKey(cursor=0), 0, 0)
    record, run = read_rollout(runner.store, rollout_key(GroupKey(cursor=0), 0))
    (segment,) = run.segments
    assert len(record.versions) == 2
    assert sum(segment.loss_mask) == record.output_tokens
    assert record.answer == run.info["hud"]["steps"][-2]["content"]


def test_the_configuration() -> None:
    config = parse_config(
        json.loads(block("json"))
        | {"base_model": "some/model", "tokenizer_model": "some/tokenizer", "lora_rank": 8}
    )
    assert config.rollout.name == "everburn.hud.rollouts:make_rollout_fn"


@pytest.mark.parametrize("name", ["run.json", "run.fireworks.json"])
def test_the_examples_configurations_and_tasks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = parse_config(json.loads((EXAMPLE / name).read_text()))
    assert config.warnings() == []
    sources: Any = (config.dataset, config.evaluation_dataset)
    training, held_out = (call(source) for source in sources)
    assert (len(training), len(held_out)) == (64, 128)
    slugs = [row["slug"] for row in training + held_out]
    assert len(set(slugs)) == 192


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("118", 1.0),
        ("118\n", 1.0),
        ("(9+9=18)118", 0.2),
        ("(9+9=18)", 0.0),
        ("119", 0.0),
        ("", 0.0),
    ],
)
def test_the_examples_grader(answer: str, reward: float) -> None:
    from hud.utils.modules import load_module

    grade = load_module(EXAMPLE / "env.py").grade(answer, 118)
    assert grade.reward == reward
    assert grade.info["brief"] == (reward == 1.0)
