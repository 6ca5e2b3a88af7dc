"""The frozen lake: a 4x4 map from a seed, and a player on it.

Cells are S (start), F (frozen), H (hole), G (goal) and P (the player). Nothing is slippery.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from zlib import crc32

SIZE = 4
HOLES = 0.25
"""Probability of a hole in each cell except start and goal."""

MOVES = {"LEFT": (0, -1), "DOWN": (1, 0), "RIGHT": (0, 1), "UP": (-1, 0)}

Cell = tuple[int, int]
"""Row and column, from the top left."""
START, GOAL = (0, 0), (SIZE - 1, SIZE - 1)


@dataclass(frozen=True)
class Map:
    """rows: one string each."""

    rows: tuple[str, ...]

    @classmethod
    @lru_cache(maxsize=4096)
    def of_seed(cls, seed: int) -> "Map":
        """The seed's first map that has a path to the goal."""
        rng = random.Random(seed)
        while True:
            cells = ["H" if rng.random() < HOLES else "F" for _ in range(SIZE * SIZE)]
            cells[0], cells[-1] = "S", "G"
            rows = tuple("".join(cells[i : i + SIZE]) for i in range(0, len(cells), SIZE))
            if START in (found := cls(rows)).distances:
                return found

    @property
    def is_held_out(self) -> bool:
        """Every eighth map is for evaluation only, independently of its seed."""
        return crc32("".join(self.rows).encode()) % 8 == 0

    @cached_property
    def distances(self) -> dict[Cell, int]:
        """Moves to the goal from each cell with a path to it."""
        found, waiting = {GOAL: 0}, deque([GOAL])
        while waiting:
            cell = waiting.popleft()
            for move in MOVES:
                near = step(cell, move)
                if near not in found and self[near] != "H":
                    found[near] = found[cell] + 1
                    waiting.append(near)
        return found

    def __getitem__(self, cell: Cell) -> str:
        return self.rows[cell[0]][cell[1]]


def step(cell: Cell, move: str) -> Cell:
    """The cell after a move; the player stays at the edge of the map."""
    row, column = (place + by for place, by in zip(cell, MOVES[move], strict=True))
    return (row, column) if 0 <= row < SIZE and 0 <= column < SIZE else cell


@dataclass
class Walk:
    """A player's way over a map. moves: the moves so far."""

    map: Map
    player: Cell = START
    moves: list[str] = field(default_factory=list)

    @property
    def at_goal(self) -> bool:
        return self.map[self.player] == "G"

    @property
    def is_over(self) -> bool:
        return self.map[self.player] in "GH"

    def move(self, direction: str) -> None:
        self.player = step(self.player, direction)
        self.moves.append(direction)

    def view(self) -> str:
        """The map with the player on it, one line per row."""
        rows = [list(row) for row in self.map.rows]
        rows[self.player[0]][self.player[1]] = "P"
        return "\n".join(map("".join, rows))
