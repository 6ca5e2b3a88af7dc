"""IGPO, information gain policy optimisation: a turn is worth what it adds to the policy's belief
in the right answer.

Owns the formulas, as pure functions over one prompt group, and `prepare_batch`, by which a run uses
them:

    "prepare_batch": {"name": "everburn.learning.igpo:prepare_batch", "kwargs": {"gamma": 0.95}}

Rollouts say where turns begin (`RolloutSample.turns`) and what the answer is
(`RolloutRun.ground_truth_tokens`). Any built-in loss trains on the advantages, since they are per
token. Doesn't own when a batch is prepared or where the result is kept (batch.py).

Source: Wang et al., Information Gain-based Policy Optimization, arXiv:2510.14967; normalisation and
discounting as in the Fireworks recipe.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from everburn.learning.batch import Batch, BatchCompletion
from everburn.rollouts.contract import RolloutSample

MIN_STD = 1e-6
"""Below it all values count as equal; also added to the deviation that divides."""


async def prepare_batch(batch: Batch, gamma: float = 0.95) -> list[list[list[list[float]]]]:
    """IGPO advantages of a sealed batch, per group, completion, segment and token.

    All prefixes of all groups are scored in one `forward` request; normalisation stays within
    each group. gamma: discount of later turns, 0 to 1.

    Raises:
        ValueError: a completion names no ground truth, or gamma is out of range.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; it discounts later turns and lies between 0 and 1")
    for group in batch.groups:
        for one in group.completions:
            if not one.rollout.ground_truth_tokens:
                raise ValueError(
                    f"row {group.cursor} · completion {one.completion} has no "
                    "RolloutRun.ground_truth_tokens, which IGPO scores: set it in rollout_fn"
                )
    completions = [one for group in batch.groups for one in group.completions]
    # Completions of a row begin with the same prompt: it is scored once.
    wanted = dict.fromkeys(sequence for one in completions for sequence in scored_sequences(one))
    logprobs = dict(zip(wanted, await batch.logprobs(list(wanted)), strict=True))
    result = []
    for group in batch.groups:
        gains = []
        for one in group.completions:
            answer = len(one.rollout.ground_truth_tokens or ())
            scores = [answer_score(logprobs[s], answer) for s in scored_sequences(one)]
            gains.append(turn_gains(scores, len(turns_of(one))))
        rewards = [one.reward for one in group.completions]
        advantages = turn_advantages(gains, rewards, gamma)
        result.append(
            [
                token_advantages(one.rollout.segments, values)
                for one, values in zip(group.completions, advantages, strict=True)
            ]
        )
    return result


def turns_of(one: BatchCompletion) -> list[tuple[RolloutSample, int]]:
    """The completion's turns over all its segments, in order: the segment of each, and where in it
    the turn's tokens begin."""
    return [(segment, start) for segment in one.rollout.segments for start in segment.turn_starts()]


def scored_sequences(one: BatchCompletion) -> list[tuple[int, ...]]:
    """What is scored of a completion: each turn's context, followed by the answer.

    The context of the first turn is the initial prompt; that of a later one holds the turns
    before it, their tool responses and the generation prompt. A completion of one turn has no gain
    to measure, and yields nothing.
    """
    turns = turns_of(one)
    if len(turns) < 2:
        return []
    answer = one.rollout.ground_truth_tokens or ()
    return [(*map(int, segment.tokens[:start]), *map(int, answer)) for segment, start in turns]


def answer_score(logprobs: Sequence[float], answer_tokens: int) -> float:
    """Score of a context: the mean raw logprob of the answer's tokens after it, in nats.

    logprobs: of the whole sequence, which ends with the answer.
    """
    return math.fsum(logprobs[-answer_tokens:]) / answer_tokens


def turn_gains(scores: Sequence[float], turns: int) -> list[float]:
    """Information gain of each turn: g_t = s_t - s_(t-1), where s_(t-1) is the score of turn t's
    own context and s_t that of the next turn's. The last turn, which answers, has gain 0.

    scores: s_0 to s_(T-1), of the contexts of T turns; may be empty where T is 1.
    """
    return [after - before for before, after in pairwise(scores)] + [0.0] * min(1, turns)


def normalise(values: Sequence[float]) -> list[float]:
    """(x - mean) / (population standard deviation + 1e-6); zeros if the deviation is below
    1e-6."""
    if not values:
        return []
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    if std < MIN_STD:
        return [0.0] * len(values)
    return [(value - mean) / (std + MIN_STD) for value in values]


def turn_advantages(
    gains: Sequence[Sequence[float]], rewards: Sequence[float], gamma: float
) -> list[list[float]]:
    """Advantages of a group's turns: A_t = c_t + gamma * A_(t+1), c_t = z(gain_t) + z(outcome_t).

    gains: per completion and turn. rewards: per completion; its last turn's outcome, those of the
    turns before it being 0. z normalises gains and outcomes separately, each over all completions
    and turns of the group.
    """
    outcomes = [
        [0.0] * (len(turns) - 1) + [reward] for turns, reward in zip(gains, rewards, strict=True)
    ]
    z_gains = iter(normalise([gain for turns in gains for gain in turns]))
    z_outcomes = iter(normalise([outcome for turns in outcomes for outcome in turns]))
    advantages = []
    for turns in gains:
        combined = [next(z_gains) + next(z_outcomes) for _ in turns]
        value, discounted = 0.0, []
        for c in reversed(combined):
            value = c + gamma * value
            discounted.append(value)
        advantages.append(discounted[::-1])
    return advantages


def token_advantages(
    segments: Sequence[RolloutSample], advantages: Sequence[float]
) -> list[list[float]]:
    """Each turn's advantage for all its tokens, per segment and token; 0 before the first turn.

    advantages: per turn, over all segments.
    """
    by_turn = iter(advantages)
    result = []
    for segment in segments:
        values = [0.0] * len(segment.tokens)
        for start in segment.turn_starts():
            values[start:] = [next(by_turn)] * (len(values) - start)
        result.append(values)
    return result
