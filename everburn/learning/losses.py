"""The built-in losses: wire names, clipping, settings and required trainer capabilities.

Unknown settings are passed through, since the service has unpublished keys. Doesn't own the
formulas (the service's; restated in everburn/emulator/training/losses.py) or Python losses
(trainers/custom_loss.py). Light: configuration and workflows import it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

LossName = Literal[
    "grpo",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "dapo",
    "gspo",
    "dppo",
    "reinforce",
]

LossConfig = dict[str, float | str | bool]
"""The service's `loss_fn_config`."""

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"


@dataclass(frozen=True, slots=True)
class BuiltinLoss:
    """A loss of the service.

    wire: its name there. clip: default thresholds of the ratio to the rollout's policy, sent unless
    the run sets its own. clips: the unit of the ratio. settings: known keys besides the common
    ones.
    """

    wire: str
    clip: tuple[float, float] | None = None
    clips: Literal["token", "sequence"] = "token"
    settings: tuple[str, ...] = ()


COMMON_SETTINGS = (
    "ratio_log_cap",
    "anchor_logprob_source",
    "weighting",
    "weighting_cap",
    "report_policy_diagnostics",
    "target_logprob_support",
)

LOSSES: Mapping[str, BuiltinLoss] = {
    # Clipped GRPO is the service's ppo, anchored at the rollout logprobs, with group advantages.
    # Schulman et al. 2017, arXiv:1707.06347; Shao et al. 2024, arXiv:2402.03300.
    "grpo": BuiltinLoss("ppo", clip=(0.8, 1.2)),
    "importance_sampling": BuiltinLoss("importance_sampling"),
    "ppo": BuiltinLoss("ppo", clip=(0.8, 1.2)),
    # MiniMax-M1, arXiv:2506.13585.
    "cispo": BuiltinLoss("cispo", clip=(0.8, 1.28)),
    # Richemond et al. 2024, arXiv:2405.19107.
    "dro": BuiltinLoss("dro", settings=("beta",)),
    # Yu et al. 2025, arXiv:2503.14476: asymmetric clipping.
    "dapo": BuiltinLoss("dapo", clip=(0.8, 1.28), settings=("eps_clip_c",)),
    # Zheng et al. 2025, arXiv:2507.18071: one ratio per sequence.
    "gspo": BuiltinLoss(
        "gspo", clip=(1 - 3e-4, 1 + 4e-4), clips="sequence", settings=("seq_ratio_log_cap",)
    ),
    # arXiv:2602.04879.
    "dppo": BuiltinLoss("dppo", settings=("divergence", "threshold")),
    # Williams 1992, doi:10.1007/BF00992696.
    "reinforce": BuiltinLoss("reinforce", settings=("score_centering",)),
}


class Clip(NamedTuple):
    """Ratios outside low..high are clipped. of: the unit of the ratio."""

    low: float
    high: float
    of: Literal["token", "sequence"]


class Need(NamedTuple):
    """A capability flag of create_model, and the setting that needs it."""

    flag: str
    what: str


def effective_settings(loss: str, settings: LossConfig) -> LossConfig:
    """The settings that are sent for a built-in loss. Its thresholds are always explicit, so that
    the ledger doesn't depend on the service's defaults."""
    clip = LOSSES[loss].clip
    thresholds: LossConfig = {} if clip is None else {LOW: clip[0], HIGH: clip[1]}
    return thresholds | settings


def wire_loss_of(loss: str, settings: LossConfig) -> tuple[str, LossConfig]:
    """The service's name and settings of a built-in loss."""
    return LOSSES[loss].wire, effective_settings(loss, settings)


def clip_of(loss: str, settings: LossConfig) -> Clip | None:
    """The clipping of a built-in loss; None without ratio thresholds. If it is anchored on the
    trained policy, the ratio is 1 everywhere and thresholds have no effect."""
    sent = effective_settings(loss, settings)
    if LOSSES[loss].clip is None or settings.get("anchor_logprob_source") == "current_detached":
        return None
    return Clip(float(sent[LOW]), float(sent[HIGH]), LOSSES[loss].clips)


def settings_problems(loss: str, settings: LossConfig) -> Iterator[str]:
    """Errors in a built-in loss's settings that don't depend on the trainer."""
    thresholds = [key for key in (LOW, HIGH) if key in settings]
    if LOSSES[loss].clip is None:
        if thresholds:
            yield f"loss {loss!r} doesn't clip: remove {' and '.join(thresholds)}"
    else:
        numbers = [settings[key] for key in thresholds]
        if any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
            yield f"{' and '.join(thresholds)} must be numbers"
        else:
            sent = effective_settings(loss, settings)
            low, high = float(sent[LOW]), float(sent[HIGH])
            if not 0 <= low <= 1 <= high or math.isinf(high):
                yield (
                    f"{LOW} {low:g} and {HIGH} {high:g} must bound the policy ratio: "
                    "0 <= low <= 1 <= high, for example 0.8 and 1.28"
                )
    support = settings.get("target_logprob_support", "full_vocabulary")
    if support != "full_vocabulary":
        yield (
            f"target_logprob_support {support!r} needs the sampled support of each token, which "
            "rollouts don't contain: use 'full_vocabulary'"
        )


def unknown_settings(loss: str, settings: LossConfig) -> list[str]:
    """Keys that are passed through unchecked."""
    known = {*COMMON_SETTINGS, *LOSSES[loss].settings}
    if LOSSES[loss].clip is not None:
        known |= {LOW, HIGH}
    return sorted(set(settings) - known)


def needs(loss: str, settings: LossConfig) -> Iterator[Need]:
    """The trainer capabilities that a built-in loss and its settings need."""
    if loss == "reinforce":
        yield Need("supports_reinforce", "loss 'reinforce'")
        if settings.get("score_centering") is True:
            yield Need("supports_score_centering", "loss_config.score_centering")
    else:
        if settings.get("weighting") in ("tis", "mis"):
            what = f"loss_config.weighting {settings['weighting']!r}"
            yield Need("supports_policy_importance_sampling", what)
        if settings.get("anchor_logprob_source") == "current_detached":
            what = "loss_config.anchor_logprob_source 'current_detached'"
            yield Need("supports_policy_importance_sampling", what)
    if settings.get("report_policy_diagnostics") is True:
        yield Need("supports_policy_diagnostics", "loss_config.report_policy_diagnostics")
