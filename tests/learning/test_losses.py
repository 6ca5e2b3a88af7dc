"""The losses of a run: what they are on the wire, and what they ask of a trainer."""

from typing import get_args

import pytest

from everburn.emulator.training.losses import LOSSES as SERVICE
from everburn.emulator.training.losses import Loss
from everburn.learning.losses import (
    LOSSES,
    Clip,
    LossName,
    Need,
    Settings,
    clip_of,
    needs,
    settings_problems,
    unknown_settings,
    wire_loss_of,
)


def test_every_loss_of_the_service_but_the_supervised_one_can_be_named():
    assert set(get_args(LossName)) == set(LOSSES)
    assert {loss.wire for loss in LOSSES.values()} == set(SERVICE) - {"cross_entropy"}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_sent_is_understood_and_is_the_services_own_default(name: str):
    """A run that sets nothing trains as one that the service's defaults were applied to."""
    wire, settings = wire_loss_of(name, {})
    assert Loss.parse(wire, settings) == Loss.parse(wire, {})


def test_grpo_is_the_wires_clipped_ppo():
    assert wire_loss_of("grpo", {}) == (
        "ppo",
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    )


def test_clipping_may_be_asymmetric_and_other_settings_pass_through():
    settings: Settings = {"clip_high_threshold": 1.4, "new_key": "x"}
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
def test_nothing_is_clipped_where_the_ratio_is_to_the_policy_itself(loss: str):
    detached: Settings = {"anchor_logprob_source": "current_detached"}
    assert clip_of(loss, detached) is None
    assert clip_of(loss, {"anchor_logprob_source": "recorded"}) == clip_of(loss, {}) is not None
    # Thresholds that can't be meant are refused all the same.
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
            "loss 'dro' doesn't clip: leave clip_low_threshold and clip_high_threshold out",
        ),
        (
            "grpo",
            {"target_logprob_support": "sampling_support"},
            "target_logprob_support 'sampling_support' needs the sampled support",
        ),
    ],
)
def test_settings_that_cannot_be_meant(loss: str, settings: Settings, text: str):
    (problem,) = settings_problems(loss, settings)
    assert text in problem


IMPORTANCE = "supports_policy_importance_sampling"


@pytest.mark.parametrize(
    ("loss", "settings", "due"),
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
def test_what_a_setting_needs_of_the_trainer(loss: str, settings: Settings, due: list[Need]):
    assert list(needs(loss, settings)) == due
