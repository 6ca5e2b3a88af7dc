"""Kills at random; `python -m benchmarks.random_kills` is the same for fifty seeds."""

import random

import pytest

from benchmarks.random_kills import disturbed_run
from chaos.harness import Chaos


@pytest.mark.chaos
@pytest.mark.parametrize("part", range(3))
async def test_a_run_survives_kills_at_random(chaos: Chaos, backend: str, part: int) -> None:
    seed = random.randrange(1_000_000)
    print(f"python -m benchmarks.random_kills --runs 1 --seed {seed} --backend {backend}")
    outcome = await disturbed_run(chaos.stack, chaos.folder, seed, backend)
    assert outcome.problem is None, outcome.line
