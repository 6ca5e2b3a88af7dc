"""IGPO (information gain policy optimization): a turn is rewarded by how much it increases the
policy's logprob of the right answer.

Owns the formulas and the `prepare_batch` that applies them:

    "prepare_batch": {"name": "everburn.learning.igpo:prepare_batch", "kwargs": {"gamma": 0.95}}

Rollouts provide the turn starts (`RolloutSample.turns`) and the answer
(`RolloutRun.ground_truth_tokens`). Any built-in loss can train on the advantages, which are per
token. Doesn't own when a batch is prepared or stored (batch.py).

Source: Wang et al., Information Gain-based Policy Optimization, arXiv:2510.14967; normalization and
discounting as in the Fireworks recipe.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from everburn.learning.batch import Batch, BatchCompletion
from everburn.rollouts.contract import RolloutSample

MIN_STD = 1e-6
"""Values with a smaller deviation count as equal; also added to the divisor."""


async def prepare_batch(batch: Batch, gamma: float = 0.95) -> list[list[list[list[float]]]]:
    """IGPO advantages per group, completion, segment and token. gamma: discount of later turns.

    All contexts are scored in one `forward` request; normalization is per group.

    Raises:
        ValueError: a completion has no ground truth, or gamma is not in 0..1.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; it discounts later turns and lies between 0 and 1")
    for group in batch.groups:
        for completion in group.completions:
            if not completion.rollout.ground_truth_tokens:
                raise ValueError(
                    f"row {group.cursor} · completion {completion.completion} has no "
                    "RolloutRun.ground_truth_tokens, which IGPO scores: set it in rollout_fn"
                )
    completions = [completion for group in batch.groups for completion in group.completions]
    # Completions of a row begin with the same prompt: it is scored once.
    sequences = list(dict.fromkeys(s for c in completions for s in scored_sequences(c)))
    logprobs = dict(zip(sequences, await batch.logprobs(sequences), strict=True))
    result = []
    for group in batch.groups:
        gains = []
        for completion in group.completions:
            answer = len(completion.rollout.ground_truth_tokens or ())
            scores = [answer_score(logprobs[s], answer) for s in scored_sequences(completion)]
            gains.append(turn_gains(scores, len(turns_of(completion))))
        rewards = [completion.reward for completion in group.completions]
        advantages = turn_advantages(gains, rewards, gamma)
        result.append(
            [
                token_advantages(completion.rollout.segments, values)
                for completion, values in zip(group.completions, advantages, strict=True)
            ]
        )
    return result


def turns_of(completion: BatchCompletion) -> list[tuple[RolloutSample, int]]:
    """The completion's turns in order: the segment and the index of the first sampled token."""
    segments = completion.rollout.segments
    return [(segment, start) for segment in segments for start in segment.turn_starts()]


def scored_sequences(completion: BatchCompletion) -> list[tuple[int, ...]]:
    """Each turn's context (all tokens before it) followed by the answer; empty for a completion of
    one turn, which has no gain."""
    turns = turns_of(completion)
    if len(turns) < 2:
        return []
    answer = completion.rollout.ground_truth_tokens or ()
    return [(*map(int, segment.tokens[:start]), *map(int, answer)) for segment, start in turns]


def answer_score(logprobs: Sequence[float], answer_tokens: int) -> float:
    """The mean raw logprob of the answer's tokens, in nats. logprobs: of the whole sequence, which
    ends with the answer."""
    return math.fsum(logprobs[-answer_tokens:]) / answer_tokens


def turn_gains(scores: Sequence[float], turns: int) -> list[float]:
    """Information gain of each turn: g_t = s_t - s_(t-1), where s_(t-1) is the score of turn t's
    context and s_t that of the next turn's context. The last turn, which answers, has gain 0.

    scores: s_0 to s_(T-1), of the contexts of T turns; may be empty if T is 1.
    """
    return [after - before for before, after in pairwise(scores)] + [0.0] * min(1, turns)


def normalize(values: Sequence[float]) -> list[float]:
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

    gains: per completion and turn. rewards: per completion; the outcome of its last turn is the
    reward, that of earlier turns is 0. z normalizes gains and outcomes separately, each over all
    completions and turns of the group.
    """
    outcomes = [
        [0.0] * (len(turns) - 1) + [reward] for turns, reward in zip(gains, rewards, strict=True)
    ]
    z_gains = iter(normalize([gain for turns in gains for gain in turns]))
    z_outcomes = iter(normalize([outcome for turns in outcomes for outcome in turns]))
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
    """Per segment and token the advantage of its turn; 0 before the first turn."""
    by_turn = iter(advantages)
    result = []
    for segment in segments:
        values = [0.0] * len(segment.tokens)
        for start in segment.turn_starts():
            values[start:] = [next(by_turn)] * (len(values) - start)
        result.append(values)
    return result
