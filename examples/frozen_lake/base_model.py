"""The emulator's base model for the frozen lake: it knows the way, and seldom looks for it.

It learns from walkers who look where they go in a part of their moves only, and in the others head
down and then right, into holes and dead ends. So it can find the way, but mostly doesn't: what RL
has to teach is to look.
"""

import random
from collections.abc import Iterator
from itertools import product

from everburn.emulator.models.recipe import Demonstration, Recipe, Shape
from everburn.emulator.models.vocabulary import END, PAD
from examples.frozen_lake.lake import GOAL, MOVES, Map, Walk, step
from examples.frozen_lake.task import STEPS, render

LOOKS = 0.35
"""Probability that a walker looks before a move."""

ROWS = tuple(
    f"{''.join(cells)}/" for cells in product("SFHP", "FHP", "FHP", "FHGP") if cells.count("P") <= 1
)
"""A token a row: any a map can have, the player's place included."""


def recipe() -> Recipe:
    return Recipe(
        name="frozen-lake",
        vocabulary=(PAD, END, *MOVES, *ROWS),
        shape=Shape(layers=2, width=128, inner=384, heads=4, kv_heads=2, positions=128),
        seed=1,
        steps=700,
        demonstrations=demonstrations,
        cuts=(24, 42),
    )


def demonstrations(rng: random.Random) -> Iterator[Demonstration]:
    """Walks over maps that aren't held out."""
    while True:
        found = Map.of_seed(rng.getrandbits(32))
        if not found.is_held_out:
            yield walk(found, rng)


def walk(found: Map, rng: random.Random) -> Demonstration:
    """One walk, from its first view of the map to its last move."""
    player = Walk(found)
    parts = []
    while not player.is_over and len(player.moves) < STEPS:
        move = best_move(player) if rng.random() < LOOKS else blind_move(player)
        parts.append((render([{"role": "user", "content": player.view()}]), False))
        parts.append((render([{"role": "assistant", "content": move}]), True))
        player.move(move)
    return parts


def best_move(player: Walk) -> str:
    """A move along a shortest path, DOWN where there is a choice."""
    distances = player.map.distances
    return min(
        ("DOWN", "RIGHT", "UP", "LEFT"),
        key=lambda move: distances.get(step(player.player, move), len(distances)),
    )


def blind_move(player: Walk) -> str:
    """To the bottom, then to the right."""
    return "DOWN" if player.player[0] < GOAL[0] else "RIGHT"
