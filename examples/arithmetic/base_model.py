"""The emulator's base model for this example: it can add, but often exceeds the token budget.

A demonstration answers directly or, mostly for sums with a carry, adds the ones first: then ten
tokens aren't enough. So the model is cut off on hard sums, like the large model of the Fireworks x
HUD recipe. RL has to teach it to answer within the budget.

Measured over four seeds: 50 to 54 s of one core; greedy on the 512 held-out pairs, with a budget of
ten tokens, 0.539 to 0.541 correct and 235 or 236 at the limit. With a budget of sixteen, or without
the working, all are correct. GRPO in a plain torch loop with the settings of run.json, three
seeds per model: 0.994 to 1.0 with rollouts one version old, 0.975 to 1.0 on-policy.
"""

import random
from collections.abc import Iterator

from everburn.emulator.models.recipe import Demonstration, Recipe, Shape
from examples.arithmetic import sums

BATCH = 64
PROBLEM_TOKENS = len(sums.problem((10, 10)))
WORKING_WITH_CARRY = 0.75
"""Share of the sums with a carry whose demonstration adds the ones first."""
WORKING_WITHOUT_CARRY = 0.10


def recipe() -> Recipe:
    return Recipe(
        name="arithmetic",
        vocabulary=sums.ALPHABET,
        shape=Shape(layers=2, width=128, inner=384, heads=4, kv_heads=2, positions=256),
        seed=1,
        steps=1300,
        demonstrations=demonstrations,
        batch=BATCH,
        cuts=(PROBLEM_TOKENS + 4,),
    )


def demonstrations(rng: random.Random) -> Iterator[Demonstration]:
    """Endless epochs of the training pairs, each in a new order."""
    while True:
        for batch in reversed(sums.batches(sums.training_pairs(), BATCH, rng)):
            for pair in batch:
                share = WORKING_WITH_CARRY if sums.carries(pair) else WORKING_WITHOUT_CARRY
                working = sums.working(pair) if rng.random() < share else ""
                yield [(sums.problem(pair), False), (working + sums.answer(pair), True)]
