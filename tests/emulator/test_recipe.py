"""Recipes and their identity."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest

from everburn.emulator.models.recipe import Demonstration
from examples.arithmetic import base_model, sums
from support.recipes import greeting


def other_greetings(rng: random.Random) -> Iterator[Demonstration]:
    while True:
        yield [("hi", False), ("hi\n", True)]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"steps": 61},
        {"learning_rate": 0.01},
        {"demonstrations": other_greetings},
        {"vocabulary": (*greeting().vocabulary, "bye")},
        {"shape": replace(greeting().shape, layers=2)},
    ],
)
def test_the_identity_changes_with_the_recipe(change: dict) -> None:
    assert replace(greeting(), **change).identity != greeting().identity
    assert greeting().identity == greeting().identity


def test_held_out_sums_are_in_no_demonstration() -> None:
    held_out = {sums.problem(pair) for pair in sums.held_out_pairs()}
    shown = list(islice(base_model.recipe().stream(), 16_000))
    assert held_out.isdisjoint(problem for (problem, _), _ in shown)
    assert len({problem for (problem, _), _ in shown}) == 8100 - 512
    assert all(learned for _, (_, learned) in shown)
