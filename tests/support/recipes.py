"""Recipes of base models that train quickly."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from everburn.emulator.models.recipe import Demonstration, Recipe, Shape
from everburn.emulator.models.vocabulary import END, PAD
from examples.arithmetic import base_model as arithmetic
from examples.arithmetic import sums
from examples.deepmath.task import small_rows
from examples.frozen_lake import base_model as frozen_lake
from examples.multihop_qa import base_model as multihop_qa

TILL = Path(__file__).parents[2] / "examples" / "hud"


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


def hasty_walker() -> Recipe:
    """The frozen lake's model, much smaller and trained briefly."""
    return _hasty(frozen_lake.recipe())


def hasty_reader() -> Recipe:
    """The model for multi-hop questions, much smaller and trained briefly."""
    return _hasty(multihop_qa.recipe())


def hasty_adder() -> Recipe:
    """The model for sums, much smaller and trained on a few of them, half with working."""
    recipe = _hasty(arithmetic.recipe())
    return replace(recipe, name="hasty-adder", demonstrations=few_sums, cuts=(12,))


def few_sums(rng: random.Random) -> Iterator[Demonstration]:
    problems = [row["messages"][0]["content"] for row in small_rows(4)]
    while True:
        problem = rng.choice(problems)
        one, other = problem.removesuffix("=").split("+")
        pair = int(one), int(other)
        working = sums.working(pair) if rng.random() < 0.5 else ""
        yield [(problem, False), (working + sums.answer(pair), True)]


def hasty_cashier() -> Recipe:
    """A small, briefly trained model for the first tasks of the cash register."""
    return replace(hasty_adder(), name="hasty-cashier", demonstrations=few_prices)


def few_prices(rng: random.Random) -> Iterator[Demonstration]:
    from everburn.hud.tasks import rows

    tasks = rows(part="training", tasks_file=str(TILL / "tasks.py"), training=8, held_out=0)
    pairs = [(task["args"]["first"], task["args"]["second"]) for task in tasks]
    while True:
        pair = rng.choice(pairs)
        working = sums.working(pair) if rng.random() < 0.5 else ""
        yield [(sums.problem(pair), False), (working + sums.answer(pair), True)]


def _hasty(recipe: Recipe) -> Recipe:
    return replace(
        recipe,
        name=f"hasty-{recipe.name}",
        shape=replace(recipe.shape, layers=1, width=32, inner=64, heads=2, kv_heads=1),
        steps=60,
        batch=16,
        learning_rate=0.01,
        warmup=5,
    )
