"""The losses that a run may train with: what each is on the wire, its clipping, and what it asks of
a trainer.

Owns names, the defaults that are sent explicitly, the rules for settings, and the capability that a
setting needs. Settings that it doesn't know are passed through: the service has keys that aren't
published. Doesn't own the formulas (the service's; everburn/emulator/training/losses.py restates
them) or a Python loss (trainers/custom_loss.py). Light: configuration and workflows import it.
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

Settings = dict[str, float | str | bool]
"""A loss's `loss_fn_config`."""

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"


@dataclass(frozen=True, slots=True)
class BuiltinLoss:
    """A loss of the service.

    wire: its name there. clip: the default thresholds of the ratio to the rollout's policy, sent
    unless the run sets its own. clips: what the ratio is of. settings: keys known beyond the
    common ones.
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
    # Clipped GRPO is the wire's ppo, anchored at the rollout logprobs, with group advantages.
    # Schulman et al. 2017, arXiv:1707.06347; Shao et al. 2024, arXiv:2402.03300.
    "grpo": BuiltinLoss("ppo", clip=(0.8, 1.2)),
    "importance_sampling": BuiltinLoss("importance_sampling"),
    "ppo": BuiltinLoss("ppo", clip=(0.8, 1.2)),
    # MiniMax-M1, arXiv:2506.13585.
    "cispo": BuiltinLoss("cispo", clip=(0.8, 1.28)),
    # Richemond et al. 2024, arXiv:2405.19107.
    "dro": BuiltinLoss("dro", settings=("beta",)),
    # Yu et al. 2025, arXiv:2503.14476: more room above than below.
    "dapo": BuiltinLoss("dapo", clip=(0.8, 1.28), settings=("eps_clip_c",)),
    # Zheng et al. 2025, arXiv:2507.18071: the ratio of a whole sequence.
    "gspo": BuiltinLoss(
        "gspo", clip=(1 - 3e-4, 1 + 4e-4), clips="sequence", settings=("seq_ratio_log_cap",)
    ),
    # arXiv:2602.04879.
    "dppo": BuiltinLoss("dppo", settings=("divergence", "threshold")),
    # Williams 1992, doi:10.1007/BF00992696.
    "reinforce": BuiltinLoss("reinforce", settings=("score_centering",)),
}


class Clip(NamedTuple):
    """Ratios outside low..high are clipped; `of` says what each is the ratio of."""

    low: float
    high: float
    of: Literal["token", "sequence"]


class Need(NamedTuple):
    """A capability flag of create_model, and the part of a configuration that needs it."""

    flag: str
    what: str


def effective_settings(loss: str, settings: Settings) -> Settings:
    """A built-in loss's settings as they are sent: its thresholds are always explicit, so that what
    the ledger records doesn't depend on anybody's defaults."""
    clip = LOSSES[loss].clip
    thresholds: Settings = {} if clip is None else {LOW: clip[0], HIGH: clip[1]}
    return thresholds | settings


def wire_loss_of(loss: str, settings: Settings) -> tuple[str, Settings]:
    """The wire's name and settings of a built-in loss."""
    return LOSSES[loss].wire, effective_settings(loss, settings)


def clip_of(loss: str, settings: Settings) -> Clip | None:
    """How a built-in loss clips; None where it doesn't by thresholds of the ratio. Anchored on the
    trained policy itself its ratio is 1 everywhere, and thresholds never bind."""
    sent = effective_settings(loss, settings)
    if LOSSES[loss].clip is None or settings.get("anchor_logprob_source") == "current_detached":
        return None
    return Clip(float(sent[LOW]), float(sent[HIGH]), LOSSES[loss].clips)


def settings_problems(loss: str, settings: Settings) -> Iterator[str]:
    """What is wrong with a built-in loss's settings, whoever the trainer is."""
    thresholds = [key for key in (LOW, HIGH) if key in settings]
    if LOSSES[loss].clip is None:
        if thresholds:
            yield f"loss {loss!r} doesn't clip: leave {' and '.join(thresholds)} out"
    else:
        numbers = [settings[key] for key in thresholds]
        if any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
            yield f"{' and '.join(thresholds)} must be numbers"
        else:
            sent = effective_settings(loss, settings)
            low, high = float(sent[LOW]), float(sent[HIGH])
            if not 0 <= low <= 1 <= high or math.isinf(high):
                yield (
                    f"{LOW} {low:g} and {HIGH} {high:g} bound the policy ratio: "
                    "0 <= low <= 1 <= high, for example 0.8 and 1.28"
                )
    support = settings.get("target_logprob_support", "full_vocabulary")
    if support != "full_vocabulary":
        yield (
            f"target_logprob_support {support!r} needs the sampled support of each token, which "
            "rollouts don't carry: use 'full_vocabulary'"
        )


def unknown_settings(loss: str, settings: Settings) -> list[str]:
    """Keys that are passed through without being known here."""
    known = {*COMMON_SETTINGS, *LOSSES[loss].settings}
    if LOSSES[loss].clip is not None:
        known |= {LOW, HIGH}
    return sorted(set(settings) - known)


def needs(loss: str, settings: Settings) -> Iterator[Need]:
    """The capabilities that a built-in loss and its settings ask of a trainer."""
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
