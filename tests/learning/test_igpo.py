"""IGPO, against an independent numpy computation with explicit loops."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everburn.learning.batch import Batch, BatchCompletion, BatchGroup
from everburn.learning.igpo import (
    answer_score,
    normalize,
    prepare_batch,
    token_advantages,
    turn_advantages,
    turn_gains,
)
from everburn.rollouts.contract import RolloutRun, RolloutSample

numbers = st.floats(-5, 5).map(lambda x: round(x, 3))
"""Rounded, so that no deviation is close to the threshold for equality."""
groups = st.lists(st.tuples(st.lists(numbers, min_size=1, max_size=5), numbers), min_size=1)


def expected_advantages(
    gains: list[list[float]], rewards: list[float], gamma: float
) -> list[list[float]]:
    """Explicit sums of discounted c over a padded matrix."""
    width = max(map(len, gains))
    gain, outcome = np.full((len(gains), width), np.nan), np.full((len(gains), width), np.nan)
    for row, turns in enumerate(gains):
        gain[row, : len(turns)] = turns
        outcome[row, : len(turns)] = 0
        outcome[row, len(turns) - 1] = rewards[row]
    c = np.zeros_like(gain)
    for values in (gain, outcome):
        std = np.nanstd(values)
        z = (values - np.nanmean(values)) / (std + 1e-6)
        c += z if std >= 1e-6 else values * 0
    return [
        [
            sum(gamma**later * c[row, turn + later] for later in range(len(turns) - turn))
            for turn in range(len(turns))
        ]
        for row, turns in enumerate(gains)
    ]


@given(group=groups, gamma=st.floats(0, 1))
def test_advantages_are_discounted_sums_of_normalized_gains_and_outcomes(
    group: list[tuple[list[float], float]], gamma: float
):
    gains, rewards = [turns for turns, _ in group], [reward for _, reward in group]
    for actual, expected in zip(
        turn_advantages(gains, rewards, gamma),
        expected_advantages(gains, rewards, gamma),
        strict=True,
    ):
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.lists(numbers))
def test_normalized_values_have_mean_zero_and_at_most_unit_deviation(values: list[float]):
    z = normalize(values)
    assert len(z) == len(values)
    if values:
        assert np.mean(z) == pytest.approx(0, abs=1e-6)
        assert np.std(z) <= 1 + 1e-9


def test_nearly_equal_values_normalize_to_zero():
    assert normalize([1.0, 1.0 + 1e-7]) == [0.0, 0.0]
    assert normalize([7.0]) == [0.0]
    assert normalize([0.0, 2.0]) == pytest.approx([-1.0, 1.0], abs=2e-6)


@given(st.lists(numbers, min_size=1, max_size=8))
def test_gains_telescope_and_the_last_turn_has_none(scores: list[float]):
    gains = turn_gains(scores, len(scores))
    assert len(gains) == len(scores)
    assert gains[-1] == 0
    assert math.fsum(gains) == pytest.approx(scores[-1] - scores[0], abs=1e-9)


def test_a_single_turn_has_no_gain():
    assert turn_gains([], 1) == [0.0]


def test_a_score_is_the_mean_over_only_the_answers_tokens():
    assert answer_score([-9.0, -1.0, -3.0], 2) == -2.0


def segment(*turns: tuple[list[int], list[int]], reward: float = 0.0, **more: Any) -> RolloutSample:
    """turns: (context, output)."""
    tokens = [token for context, output in turns for token in context + output]
    mask = [flag for context, output in turns for flag in [0] * len(context) + [1] * len(output)]
    return RolloutSample(tokens, [-1.0 * flag for flag in mask], mask, reward, **more)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    )
)
def test_each_trained_token_gets_its_turns_advantage(shape: list[list[tuple[int, int]]]):
    segments = [
        segment(*(([1] * context, [2] * output) for context, output in turns)) for turns in shape
    ]
    count = sum(map(len, shape))
    values = token_advantages(segments, [float(turn + 1) for turn in range(count)])
    trained = [
        value
        for sample, advantages in zip(segments, values, strict=True)
        for value, flag in zip(advantages, sample.loss_mask, strict=True)
        if flag
    ]
    outputs = [output for turns in shape for _, output in turns]
    assert trained == [float(i + 1) for i, output in enumerate(outputs) for _ in range(output)]


ANSWER = [8, 9]


def completion(index: int, reward: float, *segments: RolloutSample) -> BatchCompletion:
    run = RolloutRun(list(segments), ground_truth_tokens=ANSWER)
    return BatchCompletion(index, reward, 0.0, run)


class ClueScorer:
    """Scores answer tokens with -1/(1 + clues), where a clue is a token 5 in the context, and
    records its requests."""

    def __init__(self) -> None:
        self.requests: list[list[list[int]]] = []

    async def __call__(self, sequences: list[list[int]]) -> list[list[float]]:
        self.requests.append(sequences)
        return [[-1 / (1 + sequence.count(5))] * (len(sequence) - 1) for sequence in sequences]


def a_batch(scorer: ClueScorer, *groups: list[BatchCompletion]) -> Batch:
    return Batch(
        1, [BatchGroup(i, 0, {}, completions) for i, completions in enumerate(groups)], scorer
    )


async def test_a_turn_that_finds_a_clue_gets_a_higher_advantage():
    scorer = ClueScorer()
    # Both search (2), one finds a clue (5) and the other none (4); both answer (3).
    finds = completion(0, 1.0, segment(([1], [2]), ([5], [3])))
    misses = completion(1, 1.0, segment(([1], [2]), ([4], [3])))
    (((hit,), (miss,)),) = await prepare_batch(a_batch(scorer, [finds, misses]))

    (request,) = scorer.requests
    assert sorted(request) == sorted([[1, *ANSWER], [1, 2, 5, *ANSWER], [1, 2, 4, *ANSWER]])
    # Gains 0.5, 0, 0, 0: mean 0.125, deviation 0.2165; outcomes 0, 1, 0, 1.
    z = [0.375 / 0.21650735, -0.125 / 0.21650735]
    last = z[1] + 1
    assert hit[3] == miss[3] == pytest.approx(last, abs=1e-4)
    assert hit[1] == pytest.approx(z[0] - 1 + 0.95 * last, abs=1e-4)
    assert miss[1] == pytest.approx(z[1] - 1 + 0.95 * last, abs=1e-4)


async def test_a_turn_in_a_separate_segment_is_scored_in_that_segments_context():
    scorer = ClueScorer()
    split = completion(0, 1.0, segment(([1], [2])), segment(([1, 6], [3])))
    other = completion(1, 0.0, segment(([1], [2])))
    (((first, second), (single,)),) = await prepare_batch(a_batch(scorer, [split, other]), gamma=0)

    # A completion of one turn isn't scored.
    assert scorer.requests == [[[1, *ANSWER], [1, 6, *ANSWER]]]
    # No gains; outcomes 0, 1 and 0: mean 1/3, deviation 0.4714.
    z = [-(1 / 3) / 0.47140452, (2 / 3) / 0.47140452]
    assert (first[1], second[2]) == pytest.approx((z[0], z[1]), abs=1e-4)
    assert single[1] == pytest.approx(z[0], abs=1e-4)


async def test_groups_are_normalized_separately_and_scored_in_one_request():
    scorer = ClueScorer()
    easy = [
        completion(0, 1.0, segment(([1], [2]), ([5], [3]))),
        completion(1, 0.0, segment(([1], [2]), ([4], [3]))),
    ]
    flat = [completion(i, 0.0, segment(([7], [2]), ([4], [3]))) for i in (0, 1)]
    alone = await prepare_batch(a_batch(ClueScorer(), easy))
    together = await prepare_batch(a_batch(scorer, easy, flat))

    assert len(scorer.requests) == 1
    assert together[0] == alone[0]
    assert not np.any([value for (values,) in together[1] for value in values])


async def test_turn_starts_of_the_rollout_are_used():
    scorer = ClueScorer()
    two_turns = completion(0, 1.0, segment(([1], [2, 3]), turns=[1, 2]))
    await prepare_batch(a_batch(scorer, [two_turns]))
    assert scorer.requests == [[[1, *ANSWER], [1, 2, *ANSWER]]]


async def test_a_completion_without_ground_truth_is_named_in_the_error():
    bare = BatchCompletion(3, 1.0, 0.0, RolloutRun([segment(([1], [2]))]))
    with pytest.raises(ValueError, match=r"row 0 · completion 3 has no RolloutRun.ground_truth_t"):
        await prepare_batch(a_batch(ClueScorer(), [bare]))


async def test_gamma_must_be_between_zero_and_one():
    with pytest.raises(ValueError, match=r"gamma is 1\.5; it discounts"):
        await prepare_batch(a_batch(ClueScorer()), gamma=1.5)
