"""The examples' own configurations on real workers and the emulator, with fewer rows and tiny base
models."""

import json
from pathlib import Path
from typing import Any

import pytest

from everburn.learning.rollout_file import read_rollout
from everburn.records.keys import EVALUATION_ROWS_KEY, ROWS_KEY, rollout_key
from everburn.rollouts.evaluation import AFTER_KEY, BEFORE_KEY, load_report
from support.emulator import RunningEmulator
from support.farm import Start
from support.script import Script

EXAMPLES = Path(__file__).parents[2] / "examples"


def cut_short(name: str, base_model: str) -> dict[str, Any]:
    """An example's configuration with two steps of two rows, and four held-out rows."""
    values = json.loads((EXAMPLES / name / "run.json").read_text())
    rows = {"training": 4, "held_out": 4} if name == "hud" else {"count": 4}
    values["dataset"]["kwargs"] |= rows
    values["evaluation_dataset"]["kwargs"] |= rows
    return values | {
        "base_model": base_model,
        "tokenizer_model": None,
        "prompt_groups_per_step": 2,
        "completions_per_prompt": 8,  # with fewer, all rewards may be equal
    }


async def test_deepmath_trains_and_records_which_grader_decided(
    start: Start, emulator: RunningEmulator
):
    values = cut_short("deepmath", "support.recipes:hasty_adder")
    run = await start(Script(), **values, base_url=emulator.base_url)
    await run.result()

    assert len(run.ledger) == 2
    assert any(entry.updated for entry in run.ledger)
    rewards = {reward for group in run.groups for reward in group.rewards}
    assert rewards == {0.0, 1.0}
    judges = set()
    for group in run.groups:
        for member in group.members:
            record, _ = read_rollout(run.store, rollout_key(group.key, member.completion))
            judges.add(record.info["by"])
    assert "all" in judges and judges & {"string", "number", "math_verify"}
    for key in (BEFORE_KEY, AFTER_KEY):
        report = load_report(run.store, key)
        assert report is not None and len(report.samples) == 4


async def test_a_hud_environment_trains(
    start: Start, emulator: RunningEmulator, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("hud", reason="needs the extra: pip install 'everburn[hud]'")
    monkeypatch.chdir(EXAMPLES.parent)  # its paths are relative to that
    values = cut_short("hud", "support.recipes:hasty_cashier") | {"epochs": 1}
    values |= {"completions_per_prompt": 16}  # one in eight gets half the reward
    run = await start(Script(), **values, base_url=emulator.base_url)
    await run.result()

    assert len(run.ledger) == 2
    assert any(entry.updated for entry in run.ledger)
    rewards = {reward for group in run.groups for reward in group.rewards}
    assert {0.2, 1.0} <= rewards <= {0.0, 0.2, 1.0}
    trained, held_out = (
        [json.loads(line)["args"] for line in run.store.get(key).decode().splitlines()]
        for key in (ROWS_KEY, EVALUATION_ROWS_KEY)
    )
    assert len(trained) == 4
    for group in run.groups:
        for member in group.members:
            record, completion = read_rollout(run.store, rollout_key(group.key, member.completion))
            args = trained[record.row_index]
            assert record.info["expected"] == args["first"] + args["second"]
            score = record.info["hud"]["evaluation"]["score"]
            assert [segment.reward for segment in completion.segments] == [score]
    for key in (BEFORE_KEY, AFTER_KEY):
        report = load_report(run.store, key)
        assert report is not None
        expected = [args["first"] + args["second"] for args in held_out]
        assert [sample.info["expected"] for sample in report.samples] == expected
    assert {record["rollout/step"] for record in run.metrics()} == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "base_model", "tool_turns"),
    [
        ("frozen_lake", "support.recipes:hasty_walker", 12),
        ("multihop_qa", "support.recipes:hasty_reader", 8),
    ],
)
async def test_an_example_trains_over_several_turns(
    start: Start, emulator: RunningEmulator, name: str, base_model: str, tool_turns: int
):
    run = await start(Script(), **cut_short(name, base_model), base_url=emulator.base_url)
    await run.result()

    assert len(run.ledger) == 2
    assert any(entry.updated for entry in run.ledger)
    assert all((entry.prepared is not None) == (name == "multihop_qa") for entry in run.ledger)
    turns = []
    for group in run.groups:
        for member in group.members:
            record, _ = read_rollout(run.store, rollout_key(group.key, member.completion))
            assert record.info["turns"] == len(record.versions)
            turns.append(record.info["turns"])
    assert 1 < max(turns) <= tool_turns
    for key in (BEFORE_KEY, AFTER_KEY):
        report = load_report(run.store, key)
        assert report is not None and len(report.samples) == 4
