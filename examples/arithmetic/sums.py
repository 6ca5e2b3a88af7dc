"""Sums of two-digit numbers: the task of this example and of its base model.

Owns the alphabet, the form of a problem (`47+85=`, answered by `132` and a newline), and the split
of the pairs: held-out pairs are neither in demonstrations nor in training rows.
"""

import random
from collections.abc import Sequence
from functools import lru_cache

from everburn.emulator.models.vocabulary import END, PAD

ALPHABET = (PAD, END, *"0123456789+=()")
"""One token per character; END ends an answer."""

HELD_OUT = 512
SPLIT_SEED = 20

Pair = tuple[int, int]


@lru_cache(maxsize=1)
def held_out_pairs() -> tuple[Pair, ...]:
    """512 ordered pairs; (a, b) and (b, a) are on the same side of the split."""
    unordered = [(a, b) for a in range(10, 100) for b in range(a + 1, 100)]
    chosen = random.Random(SPLIT_SEED).sample(unordered, HELD_OUT // 2)
    return tuple(sorted(chosen + [(b, a) for a, b in chosen]))


@lru_cache(maxsize=1)
def training_pairs() -> tuple[Pair, ...]:
    """All other ordered pairs of numbers from 10 to 99."""
    held_out = set(held_out_pairs())
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return tuple(pair for pair in pairs if pair not in held_out)


def problem(pair: Pair) -> str:
    return f"{pair[0]}+{pair[1]}="


def answer(pair: Pair) -> str:
    return f"{sum(pair)}{END}"


def carries(pair: Pair) -> bool:
    """True if the ones add up to ten or more."""
    return pair[0] % 10 + pair[1] % 10 >= 10


def working(pair: Pair) -> str:
    """The sum of the ones, `(7+5=12)`: with a carry, too long to leave room for the answer."""
    ones = pair[0] % 10, pair[1] % 10
    return f"({ones[0]}+{ones[1]}={sum(ones)})"


def batches(pairs: Sequence[Pair], size: int, rng: random.Random) -> Sequence[Sequence[Pair]]:
    """One epoch of the pairs in a new order; drops a remainder below `size`."""
    order = rng.sample(list(pairs), len(pairs))
    return [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
