"""The built-in losses: their wire form and the trainer capabilities that they need."""

from typing import get_args

import pytest

from everburn.emulator.training.losses import LOSSES as SERVICE
from everburn.emulator.training.losses import Loss
from everburn.learning.losses import (
    LOSSES,
    Clip,
    LossConfig,
    LossName,
    Need,
    clip_of,
    needs,
    settings_problems,
    unknown_settings,
    wire_loss_of,
)


def test_each_loss_of_the_service_except_cross_entropy_has_a_name():
    assert set(get_args(LossName)) == set(LOSSES)
    assert {loss.wire for loss in LOSSES.values()} == set(SERVICE) - {"cross_entropy"}


@pytest.mark.parametrize("name", LOSSES)
def test_the_default_settings_that_are_sent_equal_the_services_defaults(name: str):
    wire, settings = wire_loss_of(name, {})
    assert Loss.parse(wire, settings) == Loss.parse(wire, {})


def test_grpo_is_the_services_clipped_ppo():
    assert wire_loss_of("grpo", {}) == (
        "ppo",
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    )


def test_clipping_may_be_asymmetric_and_unknown_settings_pass_through():
    settings: LossConfig = {"clip_high_threshold": 1.4, "new_key": "x"}
    assert wire_loss_of("cispo", settings) == (
        "cispo",
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.4, "new_key": "x"},
    )
    assert clip_of("cispo", settings) == Clip(0.8, 1.4, "token")
    assert clip_of("gspo", {}) == Clip(1 - 3e-4, 1 + 4e-4, "sequence")
    assert clip_of("importance_sampling", {}) is None
    assert unknown_settings("cispo", settings) == ["new_key"]
    assert unknown_settings("dro", {"beta": 0.1, "ratio_log_cap": 5.0}) == []


@pytest.mark.parametrize("loss", ["grpo", "cispo", "dapo", "gspo"])
def test_a_loss_anchored_on_the_trained_policy_does_not_clip(loss: str):
    detached: LossConfig = {"anchor_logprob_source": "current_detached"}
    assert clip_of(loss, detached) is None
    assert clip_of(loss, {"anchor_logprob_source": "recorded"}) == clip_of(loss, {}) is not None
    # Invalid thresholds are refused nevertheless.
    (problem,) = settings_problems(loss, {"clip_high_threshold": 0.2, **detached})
    assert "0 <= low <= 1 <= high" in problem


@pytest.mark.parametrize(
    ("loss", "settings", "text"),
    [
        ("grpo", {"clip_high_threshold": 0.2}, "0 <= low <= 1 <= high, for example 0.8 and 1.28"),
        ("dapo", {"clip_low_threshold": -0.1}, "clip_low_threshold -0.1 and clip_high_threshold"),
        ("ppo", {"clip_low_threshold": True}, "clip_low_threshold must be numbers"),
        (
            "dro",
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
            "loss 'dro' doesn't clip: remove clip_low_threshold and clip_high_threshold",
        ),
        (
            "grpo",
            {"target_logprob_support": "sampling_support"},
            "target_logprob_support 'sampling_support' needs the sampled support",
        ),
    ],
)
def test_invalid_settings(loss: str, settings: LossConfig, text: str):
    (problem,) = settings_problems(loss, settings)
    assert text in problem


IMPORTANCE = "supports_policy_importance_sampling"


@pytest.mark.parametrize(
    ("loss", "settings", "expected"),
    [
        ("grpo", {}, []),
        ("grpo", {"weighting": "none"}, []),
        ("ppo", {"weighting": "tis"}, [Need(IMPORTANCE, "loss_config.weighting 'tis'")]),
        (
            "cispo",
            {"anchor_logprob_source": "current_detached"},
            [Need(IMPORTANCE, "loss_config.anchor_logprob_source 'current_detached'")],
        ),
        (
            "reinforce",
            {"score_centering": True, "weighting": "mis"},
            [
                Need("supports_reinforce", "loss 'reinforce'"),
                Need("supports_score_centering", "loss_config.score_centering"),
            ],
        ),
        (
            "dro",
            {"report_policy_diagnostics": True},
            [Need("supports_policy_diagnostics", "loss_config.report_policy_diagnostics")],
        ),
    ],
)
def test_the_capabilities_that_settings_need(loss: str, settings: LossConfig, expected: list[Need]):
    assert list(needs(loss, settings)) == expected
