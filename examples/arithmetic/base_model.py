"""The emulator's base model for sums: it can add, but on hard sums it talks until it is cut off.

The demonstrations answer properly, or first work out the ones, and then ten tokens aren't enough
for a sum with a carry: that is what most of those with a carry do, and few others. The model learns
to add, and on hard sums it behaves as the large model of the Fireworks x HUD recipe did. That
leaves honest room for RL.

Measured over four seeds: 50 to 54 s of one core; greedy on the 512 held-out pairs, with a budget of
ten tokens, 0.539 to 0.541 correct and 235 or 236 at the limit. With a budget of sixteen, or kept
from working it out, it gets all of them right: what RL has to teach is to answer in time. GRPO in a
plain torch loop with the numbers of run.json, three seeds on each model: 0.994 to 1.0
with rollouts one version old, 0.975 to 1.0 on-policy.
"""

import random
from collections.abc import Iterator

from everburn.emulator.models.recipe import Demonstration, Recipe, Shape
from examples.arithmetic import sums

BATCH = 64
PROBLEM = len(sums.problem((10, 10)))
"""Tokens of a problem."""
WORKS_OUT_CARRIES = 0.75
WORKS_OUT_OTHERS = 0.10


def recipe() -> Recipe:
    return Recipe(
        name="arithmetic",
        vocabulary=sums.ALPHABET,
        shape=Shape(layers=2, width=128, inner=384, heads=4, kv_heads=2, positions=256),
        seed=1,
        steps=1300,
        demonstrations=demonstrations,
        batch=BATCH,
        cuts=(PROBLEM + 4,),
    )


def demonstrations(rng: random.Random) -> Iterator[Demonstration]:
    """Epoch after epoch of the training pairs, each in an order of its own."""
    while True:
        for batch in reversed(sums.batches(sums.training_pairs(), BATCH, rng)):
            for pair in batch:
                likely = WORKS_OUT_CARRIES if sums.carries(pair) else WORKS_OUT_OTHERS
                working = sums.working(pair) if rng.random() < likely else ""
                yield [(sums.problem(pair), False), (working + sums.answer(pair), True)]
