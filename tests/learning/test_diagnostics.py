"""Policy diagnostics, against an independent computation of their definitions; a planted
discrepancy shows in the right metric and in no other."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everburn.learning.datums import Datum, build_datum
from everburn.learning.diagnostics import PolicyDistance, distance_metrics, policy_distance
from everburn.learning.losses import Clip
from everburn.rollouts.contract import RolloutSample

logprob = st.floats(-6, 0)
tokens = st.tuples(logprob, logprob, logprob, st.booleans())
"""Trainer, rollout and raw logprob of a token, and whether it is trained."""
CLIP = Clip(0.8, 1.2, "token")


def datum(
    rollout: Sequence[float], raw: Sequence[float] | None, mask: Sequence[bool] | None = None
) -> Datum:
    flags = [int(flag) for flag in (mask if mask is not None else [True] * len(rollout))]
    segment = RolloutSample(
        tokens=[1] * (len(rollout) + 1),
        logprobs=[0.0, *rollout],
        loss_mask=[0, *flags],
        reward=1.0,
        raw_logprobs=None if raw is None else [0.0, *raw],
    )
    return build_datum(segment, 1.0)


def metrics_of(
    datums: list[Datum], trainer: list[Sequence[float]], clip: Clip | None = CLIP
) -> dict[str, float]:
    return distance_metrics([policy_distance(datums, trainer, clip)])


@given(st.lists(st.lists(tokens, min_size=1).filter(lambda d: any(t[3] for t in d)), min_size=1))
def test_metrics_match_their_definitions(
    data: list[list[tuple[float, float, float, bool]]],
):
    columns = [list(map(np.asarray, zip(*rows, strict=True))) for rows in data]
    datums = [datum(rollout, raw, mask) for _, rollout, raw, mask in columns]
    metrics = metrics_of(datums, [trainer for trainer, *_ in columns])

    d = np.concatenate([(trainer - rollout)[mask] for trainer, rollout, _, mask in columns])
    e = [(trainer - raw)[mask] for trainer, _, raw, mask in columns]
    assert metrics["train/ppo_kl"] == pytest.approx(-d.mean(), abs=1e-5)
    assert metrics["train/ratio_mean"] == pytest.approx(np.exp(d).mean(), rel=1e-5)
    assert metrics["train/inference_k1"] == pytest.approx(np.mean([x.mean() for x in e]), abs=1e-5)
    k3 = np.mean([(np.exp(x) - x - 1).mean() for x in e])
    assert metrics["train/inference_k3"] == pytest.approx(k3, rel=1e-4, abs=1e-5)


@given(st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=2, max_size=5))
def test_metrics_do_not_depend_on_the_split_into_requests(
    data: list[list[tuple[float, float, float, bool]]],
):
    datums = [datum([t[1] for t in rows], [t[2] for t in rows]) for rows in data]
    trainer = [[t[0] for t in rows] for rows in data]
    split = distance_metrics(
        [
            policy_distance([d], [logprobs], CLIP)
            for d, logprobs in zip(datums, trainer, strict=True)
        ]
    )
    assert split == pytest.approx(metrics_of(datums, trainer))


def test_metrics_that_cannot_be_computed_are_absent():
    assert distance_metrics([]) == {}
    assert distance_metrics([PolicyDistance()]) == {}
    assert set(metrics_of([datum([-1.0], None)], [[-1.0]], clip=None)) == {
        "train/ppo_kl",
        "train/ratio_mean",
    }


def test_sequences_without_raw_logprobs_are_not_counted():
    datums = [datum([-1.0], [-1.5]), datum([-1.0], None)]
    assert metrics_of(datums, [[-1.0], [-9.0]])["train/inference_k1"] == pytest.approx(0.5)


def test_clipping_is_counted_per_token_or_per_sequence():
    trainer = [np.log([1.0, 1.5, 0.5, 0.9]) - 1]
    data = [datum([-1.0] * 4, None)]
    assert metrics_of(data, trainer)["train/clip_frac"] == 0.5
    # The geometric mean 0.906 is within 0.8 and 1.2, but not within 0.95 and 1.05.
    assert metrics_of(data, trainer, Clip(0.8, 1.2, "sequence"))["train/clip_frac"] == 0
    assert metrics_of(data, trainer, Clip(0.95, 1.05, "sequence"))["train/clip_frac"] == 1


def test_a_huge_ratio_stays_finite():
    metrics = metrics_of([datum([-1000.0, -1000.0], [-1000.0, -1000.0])], [[0.0, 0.0]])
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert metrics["train/ppo_kl"] == -20


LOGITS = np.array([0.2, -1.0, 1.4, 0.7])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def sampled(trainer: np.ndarray, raw: np.ndarray, behavior: np.ndarray) -> dict[str, float]:
    """Metrics of one segment with each token of the vocabulary once."""
    segment = datum(log_softmax(behavior), log_softmax(raw))
    return metrics_of([segment], [log_softmax(trainer)])


def test_without_discrepancy_all_metrics_are_neutral():
    metrics = sampled(LOGITS, LOGITS, LOGITS)
    assert metrics == pytest.approx(
        {
            "train/ppo_kl": 0,
            "train/ratio_mean": 1,
            "train/clip_frac": 0,
            "train/inference_k1": 0,
            "train/inference_k3": 0,
        },
        abs=1e-6,
    )


def test_a_temperature_shows_in_the_policy_ratio_and_not_in_the_inference_metrics():
    """Sampled at temperature 0.5 from exactly the trained model."""
    metrics = sampled(LOGITS, LOGITS, LOGITS / 0.5)
    assert abs(metrics["train/ppo_kl"]) > 0.1
    assert metrics["train/clip_frac"] > 0.5
    assert metrics["train/inference_k1"] == pytest.approx(0, abs=1e-6)
    assert metrics["train/inference_k3"] == pytest.approx(0, abs=1e-6)


def test_a_stale_sampler_shows_in_the_inference_metrics():
    """Sampled at temperature 1 from other weights than the trainer's."""
    stale = LOGITS + np.array([0.5, 0.0, -0.5, 0.3])
    metrics = sampled(LOGITS, stale, stale)
    assert metrics["train/inference_k3"] > 0.02
    assert abs(metrics["train/inference_k1"]) > 0.02
    # Raw and sampling logprobs are equal here, so the policy ratio shows it too.
    assert metrics["train/ppo_kl"] == pytest.approx(-metrics["train/inference_k1"], abs=1e-6)
