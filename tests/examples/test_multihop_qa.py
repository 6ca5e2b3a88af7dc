"""Multi-hop questions: search, grading, rows, plain text, and what the base model is shown."""

import random
from itertools import islice

import pytest

from everburn.emulator.models.vocabulary import Vocabulary
from examples.multihop_qa.base_model import PATIENCE, conversation, recipe
from examples.multihop_qa.grading import token_f1
from examples.multihop_qa.search import Search
from examples.multihop_qa.task import call_text, parse, render, results, rows
from examples.multihop_qa.world import row

PARAGRAPHS = (
    "The teacher of Mira is Tom",
    "The cousin of Mira is Ben",
    "Tom was born in North Arden",
    "Ben was born in Upper Holm",
    "Nothing else is known here",
)


@pytest.mark.parametrize(
    ("answer", "f1"),
    [
        ("North Arden", 1.0),
        ("the north, arden!", 1.0),
        ("Arden North", 1.0),
        ("South Arden", 0.5),
        ("Arden", 2 / 3),
        ("North North Arden", 0.8),
        ("in North Arden", 0.8),
        ("Belmar", 0.0),
        ("", 0.0),
    ],
)
def test_token_f1(answer: str, f1: float) -> None:
    assert token_f1(answer, "North Arden") == pytest.approx(f1)


def test_f1_of_answers_without_words() -> None:
    assert token_f1("The", "a") == 1.0
    assert token_f1("", "Arden") == 0.0


def test_search_finds_the_two_that_fit_best() -> None:
    search = Search(PARAGRAPHS)
    assert search.top("teacher Mira") == [PARAGRAPHS[0], PARAGRAPHS[1]]
    assert search.top("BEN, born?") == [PARAGRAPHS[3], PARAGRAPHS[1]]
    assert search.top("Tom born", count=1) == [PARAGRAPHS[2]]


def test_rare_words_weigh_more_than_common_ones() -> None:
    assert Search(["x common", "common y", "common z"]).top("common y", count=1) == ["common y"]


def test_search_finds_nothing_without_a_shared_word() -> None:
    assert Search(PARAGRAPHS).top("zebra") == []
    assert Search(PARAGRAPHS).top("") == []
    assert Search([]).top("Mira") == []
    assert results(Search(PARAGRAPHS), "zebra") == "-"


def test_rows_are_always_the_same_and_no_world_is_told_twice() -> None:
    training, held_out = rows(96, seed=1), rows(128, seed=2)
    assert training == rows(96, seed=1)
    worlds = {tuple(sorted(one["context"])) for one in training + held_out}
    assert len(worlds) == 96 + 128


def test_every_question_takes_two_searches() -> None:
    for one in rows(200, seed=3):
        said = [text for text, learned in patient(one) if learned]
        assert said[-1] == f"submit_answer: {one['ground_truth']}\n"
        first, second = [text for text, learned in patient(one) if not learned][1:]
        assert one["ground_truth"] not in first
        assert second.splitlines()[0].endswith(one["ground_truth"])


def patient(one: dict) -> list:
    """A conversation to the end of the question."""
    rng = random.Random(0)
    while len(found := conversation(one, rng)) < 6:
        pass
    return list(found)


def test_plain_text() -> None:
    assert render([{"role": "user", "content": "Who?"}]) == "Who?\n"
    (call,) = parse("search: teacher Mira").tool_calls
    assert (call.name, call.arguments, call.problem) == ("search", {"query": "teacher Mira"}, None)
    (call,) = parse(call_text("submit_answer", "North Arden")).tool_calls
    assert (call.name, call.arguments) == ("submit_answer", {"answer": "North Arden"})


@pytest.mark.parametrize("text", ["", "search:", "search: ", "North Arden", "shout: Mira"])
def test_what_is_no_call_cant_be_run(text: str) -> None:
    assert parse(text).tool_calls[0].problem is not None


def test_the_base_model_is_shown_conversations_in_its_own_words() -> None:
    vocabulary = Vocabulary(recipe().vocabulary)
    patience = []
    for demonstration in islice(recipe().stream(), 1000):
        vocabulary.encode("".join(text for text, _ in demonstration))
        said = [parse(text).tool_calls[0].name for text, learned in demonstration if learned]
        assert said in (["search", "submit_answer"], ["search", "search", "submit_answer"])
        patience.append(len(said) == 3)
    assert abs(sum(patience) / 1000 - PATIENCE) < 0.05


def test_all_texts_of_all_rows_are_in_its_vocabulary() -> None:
    vocabulary, rng = Vocabulary(recipe().vocabulary), random.Random(5)
    for _ in range(200):
        one = row(rng)
        vocabulary.encode(render(one["messages"]))
        vocabulary.encode(call_text("submit_answer", one["ground_truth"]))
        for paragraph in one["context"]:
            vocabulary.encode(f"- {paragraph}\n")
