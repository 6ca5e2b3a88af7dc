"""Each loss compared with its formula, computed token by token with plain floats."""

import math
from collections.abc import Callable

import pytest
import torch

from everburn.emulator.errors import InvalidInput
from everburn.emulator.training.losses import LOSSES, Diagnostics, Loss

CURRENT = [-0.5, -1.0, -2.0, -0.1, -3.0]
RECORDED = [-0.6, -2.5, -1.0, -0.1, -1.5]
ADVANTAGES = [0.0, 1.5, -0.5, 1.0, -2.0]
TRAINED = [index for index, advantage in enumerate(ADVANTAGES) if advantage]


def evaluate(name: str, config: dict[str, object] | None = None) -> list[float]:
    loss = Loss.parse(name, config)
    rows = (torch.tensor([values]) for values in (CURRENT, RECORDED, ADVANTAGES))
    return loss(*rows)[0].tolist()


def by_token(formula: Callable[[float, float, float], float]) -> list[float]:
    """The formula over (log pi, log q, A) at trained tokens, 0 elsewhere."""
    return [
        formula(CURRENT[i], RECORDED[i], ADVANTAGES[i]) if i in TRAINED else 0.0
        for i in range(len(CURRENT))
    ]


def clip(ratio: float, low: float, high: float) -> float:
    return max(low, min(high, ratio))


def clipped(ratio: float, a: float, low: float, high: float) -> float:
    return -min(ratio * a, clip(ratio, low, high) * a)


def test_cross_entropy_is_the_weighted_negative_log_likelihood() -> None:
    assert evaluate("cross_entropy") == pytest.approx(by_token(lambda p, q, w: -w * p))


def test_importance_sampling_weighs_the_advantage_by_the_ratio() -> None:
    assert evaluate("importance_sampling") == pytest.approx(
        by_token(lambda p, q, a: -math.exp(p - q) * a)
    )


def test_ppo_takes_the_worse_of_clipped_and_unclipped() -> None:
    assert evaluate(
        "ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}
    ) == pytest.approx(by_token(lambda p, q, a: clipped(math.exp(p - q), a, 0.7, 1.1)))


def test_cispo_weighs_the_logprob_by_the_clipped_ratio() -> None:
    assert evaluate("cispo") == pytest.approx(
        by_token(lambda p, q, a: -clip(math.exp(p - q), 0.8, 1.28) * a * p)
    )


def test_dro_penalizes_the_squared_distance() -> None:
    assert evaluate("dro", {"beta": 0.3}) == pytest.approx(
        by_token(lambda p, q, a: -(p * a - 0.15 * (p - q) ** 2))
    )


def test_dapo_clips_asymmetrically_and_bounds_negative_advantages() -> None:
    def formula(p: float, q: float, a: float) -> float:
        single = clipped(math.exp(p - q), a, 0.8, 1.28)
        return min(single, -1.5 * a) if a < 0 else single

    assert evaluate("dapo", {"eps_clip_c": 1.5}) == pytest.approx(by_token(formula))


def test_gspo_shares_one_ratio_per_sequence_and_averages_over_tokens() -> None:
    distances = [CURRENT[i] - RECORDED[i] for i in TRAINED]
    ratio = math.exp(sum(distances) / len(TRAINED))
    thresholds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    assert evaluate("gspo", thresholds) == pytest.approx(
        by_token(lambda p, q, a: clipped(ratio, a, 0.9, 1.1) / len(TRAINED))
    )


@pytest.mark.parametrize(("divergence", "threshold"), [("binary_tv", 0.2), ("binary_kl", 0.175)])
def test_dppo_masks_updates_that_widen_the_divergence(divergence: str, threshold: float) -> None:
    def distance(p: float, q: float) -> float:
        if divergence == "binary_tv":
            return abs(p - q)
        return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))

    def formula(p: float, q: float, a: float) -> float:
        ratio = math.exp(p - q)
        widens = (a > 0 and ratio > 1) or (a < 0 and ratio < 1)
        masked = widens and distance(math.exp(p), math.exp(q)) > threshold
        return 0.0 if masked else -ratio * a

    values = evaluate("dppo", {"divergence": divergence, "threshold": threshold})
    assert values == pytest.approx(by_token(formula))
    assert [values[i] for i in TRAINED].count(0.0) == 2  # some tokens are masked, not all


def test_reinforce_ignores_recorded_logprobs_unless_weighted() -> None:
    assert evaluate("reinforce") == pytest.approx(by_token(lambda p, q, a: -a * p))


def test_truncated_importance_weights_are_capped() -> None:
    config = {"weighting": "tis", "weighting_cap": 2.0}
    assert evaluate("reinforce", config) == pytest.approx(
        by_token(lambda p, q, a: -min(math.exp(p - q), 2.0) * a * p)
    )


def test_masked_importance_weights_are_zero_outside_the_bounds() -> None:
    def formula(p: float, q: float, a: float) -> float:
        weight = math.exp(p - q)
        return -weight * a * p if 0.5 <= weight <= 2.0 else 0.0

    config = {"weighting": "mis", "weighting_cap": 2.0}
    assert evaluate("reinforce", config) == pytest.approx(by_token(formula))


def test_a_detached_anchor_makes_the_ratio_one() -> None:
    config = {"anchor_logprob_source": "current_detached"}
    assert evaluate("ppo", config) == pytest.approx(by_token(lambda p, q, a: -a))


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_padding_of_any_value_stays_out_of_loss_and_gradient(name: str) -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    recorded = torch.tensor([[-1.0, -1e30, 1e30]])
    loss = Loss.parse(name, None)(logprobs, recorded, torch.tensor([[1.0, 0.0, 0.0]]))
    loss.sum().backward()
    assert logprobs.grad is not None
    assert loss[0, 1:].tolist() == [0.0, 0.0]
    assert logprobs.grad[0, 1:].tolist() == [0.0, 0.0]
    assert logprobs.grad[0, 0] != 0


def test_diagnostics_measure_the_distance_over_trained_tokens() -> None:
    loss = Loss.parse("ppo", {"report_policy_diagnostics": True})
    measured = Diagnostics()
    measured.add(loss, *(torch.tensor([v]) for v in (CURRENT, RECORDED, ADVANTAGES)))
    ratios = [math.exp(CURRENT[i] - RECORDED[i]) for i in TRAINED]
    assert loss.reports_diagnostics
    assert measured.metrics() == pytest.approx(
        {
            "policy_ratio:mean": sum(ratios) / len(ratios),
            "policy_ratio:max": max(ratios),
            "policy_kl:mean": sum(r - 1 - math.log(r) for r in ratios) / len(ratios),
            "policy_outside_clip:mean": sum(not 0.8 <= r <= 1.2 for r in ratios) / len(ratios),
        }
    )


@pytest.mark.parametrize(
    ("name", "config", "complaint"),
    [
        ("grpo", None, "unknown loss_fn 'grpo'"),
        ("ppo", {"clip_low": 0.8}, "has no 'clip_low'"),
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": float("nan")}, "finite number"),
        ("dppo", {"divergence": "kl"}, "binary_tv, binary_kl"),
        ("dapo", {"eps_clip_c": 1.0}, "eps_clip_c must be above 1"),
        ("cross_entropy", {"target_logprob_support": "candidates"}, "full_vocabulary"),
        ("dro", {"report_policy_diagnostics": 1}, "true or false"),
    ],
)
def test_invalid_settings_are_refused(
    name: str, config: dict[str, object] | None, complaint: str
) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        Loss.parse(name, config)
