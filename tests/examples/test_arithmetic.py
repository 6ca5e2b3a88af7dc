"""The arithmetic example: its grader, its rows and its prompts."""

import pytest
from transformers import AutoTokenizer

from everburn.emulator.models.base_model import TINY, tokenizer_path
from examples.arithmetic.task import expected, grade_final_integer, products, render, sums
from support.answers import READABLE, RIGHT, UNREADABLE


@pytest.mark.parametrize(
    "answer",
    READABLE,
)
def test_the_right_integer_on_the_last_line_scores(answer: str) -> None:
    assert grade_final_integer(answer, RIGHT) == (1.0, {"expected": RIGHT, "got": RIGHT})


def test_a_negative_product_scores() -> None:
    assert grade_final_integer("-12", -12)[0] == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        *UNREADABLE,
    ],
)
def test_an_unreadable_last_line_scores_nothing(answer: str) -> None:
    assert grade_final_integer(answer, RIGHT) == (0.0, {"expected": RIGHT, "got": None})


def test_a_wrong_integer_is_told_from_an_unreadable_line() -> None:
    assert grade_final_integer("15637838", RIGHT) == (0.0, {"expected": RIGHT, "got": 15637838})


def test_held_out_sums_are_in_no_training_row_in_either_order() -> None:
    held_out = {(row["a"], row["b"]) for row in sums(512, held_out=True)}
    training = {(row["a"], row["b"]) for row in sums(320)}

    assert len(held_out) == 512
    assert len(training) == 320
    assert not training & held_out
    assert not training & {(b, a) for a, b in held_out}


def test_products_of_two_sets_are_disjoint_and_always_the_same() -> None:
    training, held_out = products(128), products(128, skip=128)

    assert training == products(128)
    assert not any(row in training for row in held_out)
    assert all(1000 <= row["a"] <= 9999 and 1000 <= row["b"] <= 9999 for row in held_out)


def test_a_plain_model_gets_plain_text_and_a_chat_model_its_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(
        tokenizer_path("examples.arithmetic.base_model:recipe")
    )
    row = {"a": 47, "operator": "+", "b": 85}
    assert tokenizer.decode(render(tokenizer, row)) == "47+85="

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path(TINY))
    tokenizer.chat_template = "{{ messages[0].content }}?"
    assert "hat is 47 + 85?" in tokenizer.decode(render(tokenizer, row))


def test_expected_answers() -> None:
    assert expected({"a": 47, "operator": "+", "b": 85}) == 132
    assert expected({"a": 1234, "operator": "*", "b": 5678}) == 7_006_652
