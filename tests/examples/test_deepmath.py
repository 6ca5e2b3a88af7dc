"""The DeepMath example: what is read, who judges, and its configurations."""

import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from everburn.config import parse_config
from everburn.emulator.models import base_model
from examples.deepmath.grading import (
    Grader,
    UndecidedError,
    equal_numbers,
    last_boxed,
    normalised,
)
from examples.deepmath.task import INSTRUCTION, deepmath_rows, render, small_rows

FOLDER = Path(__file__).parents[2] / "examples" / "deepmath"


@pytest.fixture
async def grader() -> AsyncIterator[Grader]:
    grader = Grader()
    yield grader
    await grader.close()


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
        (r"\boxed{7} and then \boxed{\frac{1}{", "7"),
        (r"\boxed{}", ""),
        ("42", None),
        (r"\boxed{1", None),
    ],
)
def test_the_last_complete_box_is_read(text: str, box: str | None) -> None:
    assert last_boxed(text) == box


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r" x = 3 ", "x=3"),
        (r"\left( 1,\, 2 \right)", "(1,2)"),
        ("1,234,567", "1234567"),
        (r"\text{Yes}", "yes"),
        ("$42$.", "42"),
    ],
)
def test_what_is_written_alike_is_equal(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


def test_numbers_within_a_millionth_are_equal() -> None:
    assert equal_numbers("0.5000004", "0.5")
    assert equal_numbers("3000000.0000004", "3,000,000")
    assert equal_numbers("1e3", "1000")
    assert not equal_numbers("0.500002", "0.5")
    assert not equal_numbers("3000000.5", "3,000,000")
    for no_number in ("x", "", "nan", "inf", "1e999999999999999999999"):
        assert not equal_numbers(no_number, "0.5")
    assert not equal_numbers("inf", "inf")


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("3000001", "3000000"),
        ("123456790", "123456789"),
        ("-9007199254740993", "-9007199254740992"),
        ("100000000000000000000000000000000000001", "100000000000000000000000000000000000000"),
    ],
)
async def test_integers_have_to_be_the_same(grader: Grader, answer: str, truth: str) -> None:
    assert not equal_numbers(answer, truth)
    for judges in (grader, Grader(command=())):
        grade = await judges.grade(answer, truth)
        assert (grade.reward, grade.by) == (0.0, "all")


@pytest.mark.parametrize(
    ("answer", "truth", "reward", "by"),
    [
        ("132", "132", 1.0, "string"),
        (r"\frac{264}{2}", "132", 1.0, "math_verify"),
        (r"(x+1)^2", r"x^2+2x+1", 1.0, "math_verify"),
        ("131", "132", 0.0, "all"),
        (r"\frac{", "132", 0.0, "all"),
        (None, "132", 0.0, "no box"),
    ],
)
async def test_the_judges_in_their_order(
    grader: Grader, answer: str | None, truth: str, reward: float, by: str
) -> None:
    grade = await grader.grade(answer, truth)
    assert (grade.reward, grade.by) == (reward, by)


async def test_without_math_verify_numbers_are_compared() -> None:
    grader = Grader(command=())
    assert (await grader.grade("132.0", "132")).by == "number"
    assert (await grader.grade("133", "132")).reward == 0.0


async def test_a_judge_that_hangs_is_killed_and_its_verdict_is_no_zero() -> None:
    hangs = "import sys, time; sys.stdin.readline(); time.sleep(3600)"
    grader = Grader([sys.executable, "-c", hangs], seconds=1.0)
    began = time.monotonic()
    with pytest.raises(UndecidedError, match="didn't judge 'x'"):
        await grader.grade("x", "132")
    assert time.monotonic() - began < 30
    assert (await grader.grade("132.0", "132")).by == "number"  # another judge could tell
    assert grader._process is None


async def test_a_judge_that_dies_is_replaced() -> None:
    once = "import sys; sys.stdin.readline(); print('true', flush=True)"
    grader = Grader([sys.executable, "-c", once])
    for _ in range(2):
        assert (await grader.grade("x", "y")).by == "math_verify"
        assert grader._process is not None
        await grader._process.wait()


def test_small_rows_suit_the_emulators_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_model.ensure(base_model.TINY))
    rows = small_rows(64)
    assert len({row["ground_truth"] for row in rows}) > 16
    assert {frozenset(row) for row in rows} == {frozenset({"messages", "ground_truth"})}
    for row in rows:
        assert tokenizer.decode(render(tokenizer, row["messages"])) == row["messages"][0]["content"]
    asked = {row["messages"][0]["content"] for row in rows}
    assert asked.isdisjoint(row["messages"][0]["content"] for row in small_rows(64, held_out=True))


def test_rows_of_the_data_set(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"question": f"q{i}", "final_answer": i}) for i in range(5)]
    file.write_text("\n".join(lines))
    rows = deepmath_rows(str(file), count=2, skip=1)
    assert [row["ground_truth"] for row in rows] == ["1", "2"]
    assert rows[0]["messages"] == [{"role": "user", "content": f"q1\n\n{INSTRUCTION}"}]


@pytest.mark.parametrize("name", ["run.json", "run.fireworks.json", "run.dedicated.json"])
def test_configurations_are_valid_and_differ_in_nothing_but_settings(name: str) -> None:
    config = parse_config(json.loads((FOLDER / name).read_text()))
    assert config.rollout.name == "examples.deepmath.task:make_rollout_fn"
    assert config.warnings() == []
