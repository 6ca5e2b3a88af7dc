"""The emulator's base model for multi-hop questions: it can search twice, but seldom does.

Most of its demonstrations stop after the first search, which names a person, and guess a place. RL
has to teach it to make the second search.
"""

import random
from collections.abc import Iterator
from typing import Any

from everburn.emulator.models.recipe import Demonstration, Recipe, Shape
from everburn.emulator.models.vocabulary import END, PAD
from examples.multihop_qa.search import Search
from examples.multihop_qa.task import call_text, render, results
from examples.multihop_qa.world import FACTS, PEOPLE, REGIONS, RELATIONS, TOWNS, row

PATIENCE = 0.3
"""Probability that a second search is made."""

NAMES = (*PEOPLE, *REGIONS, *TOWNS, *RELATIONS)
TOKENS = (
    *("Where was the", "Where does the", " of", " born?", " work?"),
    *("search:", "submit_answer:", " born", " works"),
    *("-", " The", " is", *(f" {fact}" for fact in FACTS)),
    *(f" {name}" for name in NAMES),
)


def recipe() -> Recipe:
    return Recipe(
        name="multihop-qa",
        vocabulary=(PAD, END, *TOKENS),
        shape=Shape(layers=2, width=128, inner=384, heads=4, kv_heads=2, positions=256),
        seed=1,
        steps=700,
        demonstrations=demonstrations,
        cuts=(32,),
    )


def demonstrations(rng: random.Random) -> Iterator[Demonstration]:
    """Conversations about worlds that don't occur in any row."""
    while True:
        yield conversation(row(rng), rng)


def conversation(asked: dict[str, Any], rng: random.Random) -> Demonstration:
    """A conversation that ends with the right or a guessed answer; `asked` is a row."""
    question = asked["messages"][0]["content"]
    *_, relation, _, person, verb = question.rstrip("?").split()
    paragraphs = Search(asked["context"])
    parts = [(render(asked["messages"]), False)]

    def say(name: str, argument: str) -> str:
        """A call and its result."""
        parts.append((call_text(name, argument), True))
        answer = results(paragraphs, argument) if name == "search" else ""
        if answer:
            parts.append((render([{"role": "tool", "content": answer}]), False))
        return answer

    first = say("search", f"{relation} {person}")
    answer = f"{rng.choice(REGIONS)} {rng.choice(TOWNS)}"
    if rng.random() < PATIENCE:
        other = first.splitlines()[0].split()[-1]
        say("search", f"{other} {'born' if verb == 'born' else 'works'}")
        answer = asked["ground_truth"]
    say("submit_answer", answer)
    return parts
