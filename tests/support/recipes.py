"""Recipes of base models that are made in no time."""

import random
from collections.abc import Iterator

from everburn.emulator.recipe import Demonstration, Recipe, Shape
from everburn.emulator.vocabulary import END, PAD


def greeting() -> Recipe:
    """A model that learns to answer `hi` with `hello`."""
    return Recipe(
        name="greeting",
        vocabulary=(PAD, END, "hi", "hello"),
        shape=Shape(layers=1, width=16, inner=32, heads=2, kv_heads=1, positions=32),
        seed=1,
        steps=60,
        demonstrations=greetings,
        batch=4,
        cuts=(3,),
        learning_rate=0.02,
        warmup=5,
    )


def greetings(rng: random.Random) -> Iterator[Demonstration]:
    while True:
        before = "hi" if rng.random() < 0.5 else ""
        yield [(f"{before}hi", False), ("hello\n", True)]


def no_recipe() -> str:
    return "a cake"
