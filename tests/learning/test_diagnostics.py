"""Policy diagnostics, against their definitions computed another way; and a planted discrepancy is
seen in the right metric and in no other."""

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
"""Trainer's, rollout's and raw logprob of a token, and whether it is trained."""
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


def of(
    datums: list[Datum], own: list[Sequence[float]], clip: Clip | None = CLIP
) -> dict[str, float]:
    return distance_metrics([policy_distance(datums, own, clip)])


@given(st.lists(st.lists(tokens, min_size=1).filter(lambda d: any(t[3] for t in d)), min_size=1))
def test_metrics_are_what_they_are_defined_to_be(
    data: list[list[tuple[float, float, float, bool]]],
):
    columns = [list(map(np.asarray, zip(*rows, strict=True))) for rows in data]
    datums = [datum(rollout, raw, mask) for _, rollout, raw, mask in columns]
    got = of(datums, [own for own, *_ in columns])

    d = np.concatenate([(own - rollout)[mask] for own, rollout, _, mask in columns])
    e = [(own - raw)[mask] for own, _, raw, mask in columns]
    assert got["train/ppo_kl"] == pytest.approx(-d.mean(), abs=1e-5)
    assert got["train/ratio_mean"] == pytest.approx(np.exp(d).mean(), rel=1e-5)
    assert got["train/inference_k1"] == pytest.approx(np.mean([x.mean() for x in e]), abs=1e-5)
    k3 = np.mean([(np.exp(x) - x - 1).mean() for x in e])
    assert got["train/inference_k3"] == pytest.approx(k3, rel=1e-4, abs=1e-5)


@given(st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=2, max_size=5))
def test_it_does_not_matter_how_a_batch_was_cut_into_requests(
    data: list[list[tuple[float, float, float, bool]]],
):
    datums = [datum([t[1] for t in rows], [t[2] for t in rows]) for rows in data]
    own = [[t[0] for t in rows] for rows in data]
    apart = distance_metrics(
        [policy_distance([one], [mine], CLIP) for one, mine in zip(datums, own, strict=True)]
    )
    assert apart == pytest.approx(of(datums, own))


def test_what_cannot_be_computed_is_absent():
    assert distance_metrics([]) == {}
    assert distance_metrics([PolicyDistance()]) == {}
    assert set(of([datum([-1.0], None)], [[-1.0]], clip=None)) == {
        "train/ppo_kl",
        "train/ratio_mean",
    }


def test_sequences_without_raw_logprobs_do_not_count_for_the_others():
    datums = [datum([-1.0], [-1.5]), datum([-1.0], None)]
    assert of(datums, [[-1.0], [-9.0]])["train/inference_k1"] == pytest.approx(0.5)


def test_tokens_outside_the_thresholds_are_clipped_by_themselves_or_with_their_sequence():
    own = [np.log([1.0, 1.5, 0.5, 0.9]) - 1]
    data = [datum([-1.0] * 4, None)]
    assert of(data, own)["train/clip_frac"] == 0.5
    # Their geometric mean is 0.906: within 0.8 and 1.2, but not within 0.95 and 1.05.
    assert of(data, own, Clip(0.8, 1.2, "sequence"))["train/clip_frac"] == 0
    assert of(data, own, Clip(0.95, 1.05, "sequence"))["train/clip_frac"] == 1


def test_a_ratio_that_no_float_holds_is_still_a_number():
    metrics = of([datum([-1000.0, -1000.0], [-1000.0, -1000.0])], [[0.0, 0.0]])
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert metrics["train/ppo_kl"] == -20


LOGITS = np.array([0.2, -1.0, 1.4, 0.7])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def sampled(trainer: np.ndarray, raw: np.ndarray, behaviour: np.ndarray) -> dict[str, float]:
    """Every token of the alphabet once, in one segment."""
    one = datum(log_softmax(behaviour), log_softmax(raw))
    return of([one], [log_softmax(trainer)])


def test_without_any_discrepancy_all_is_at_rest():
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


def test_a_temperature_is_seen_in_the_policy_ratio_and_not_as_a_discrepancy_of_inference():
    """Sampled at half the temperature, from exactly the model that is trained."""
    metrics = sampled(LOGITS, LOGITS, LOGITS / 0.5)
    assert abs(metrics["train/ppo_kl"]) > 0.1
    assert metrics["train/clip_frac"] > 0.5
    assert metrics["train/inference_k1"] == pytest.approx(0, abs=1e-6)
    assert metrics["train/inference_k3"] == pytest.approx(0, abs=1e-6)


def test_a_stale_sampler_is_seen_as_a_discrepancy_of_inference():
    """Sampled at temperature 1 from weights that aren't the trainer's."""
    stale = LOGITS + np.array([0.5, 0.0, -0.5, 0.3])
    metrics = sampled(LOGITS, stale, stale)
    assert metrics["train/inference_k3"] > 0.02
    assert abs(metrics["train/inference_k1"]) > 0.02
    # Here raw and sampling logprobs are the same, so the ratio to the rollout shows it too.
    assert metrics["train/ppo_kl"] == pytest.approx(-metrics["train/inference_k1"], abs=1e-6)
