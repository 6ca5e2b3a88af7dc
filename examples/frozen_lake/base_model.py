"""The emulator's base model for the frozen lake: it can find the way, but mostly walks blindly.

Its demonstrations take the best move only with probability LOOKS, and else walk down and then
right, into holes and dead ends. RL has to teach it to take the best move.
"""

import random
from collections.abc import Iterator
from itertools import product

from everburn.emulator.models.recipe import Demonstration, Recipe, Shape
from everburn.emulator.models.vocabulary import END, PAD
from examples.frozen_lake.lake import GOAL, MOVES, Map, Walk, step
from examples.frozen_lake.task import STEPS, render

LOOKS = 0.35
"""Probability that a demonstration takes the best move."""

ROWS = tuple(
    f"{''.join(cells)}/" for cells in product("SFHP", "FHP", "FHP", "FHGP") if cells.count("P") <= 1
)
"""One token per map row: all possible rows, including those with the player."""


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
    """Walks over training maps."""
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
    """A move along a shortest path, preferably DOWN."""
    distances = player.map.distances
    return min(
        ("DOWN", "RIGHT", "UP", "LEFT"),
        key=lambda move: distances.get(step(player.player, move), len(distances)),
    )


def blind_move(player: Walk) -> str:
    """Down to the bottom, then right."""
    return "DOWN" if player.player[0] < GOAL[0] else "RIGHT"
