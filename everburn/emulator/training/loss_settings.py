"""Settings of the built-in losses: the keys of `loss_fn_config`, their defaults and checks.

Unknown keys are refused: a mistyped threshold that is ignored would train the wrong objective.
Doesn't own the formulas (losses.py).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from everburn.emulator.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The keys that every loss accepts."""

    target_logprob_support: Literal["full_vocabulary"] = "full_vocabulary"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossSettings(LossSettings):
    """The keys that every policy loss accepts."""

    ratio_log_cap: float = 20.0
    anchor_logprob_source: Literal["recorded", "current_detached"] = "recorded"
    weighting: Literal["none", "tis", "mis"] = "none"
    weighting_cap: float = 5.0
    """tis: largest weight; mis: weights outside [1/cap, cap] become zero."""
    report_policy_diagnostics: bool = False

    def __post_init__(self) -> None:
        _require(self.ratio_log_cap >= 0, "ratio_log_cap", "must not be negative")
        _require(self.weighting_cap >= 1, "weighting_cap", "must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedSettings(PolicyLossSettings):
    """The thresholds bound the ratio itself: 0.8 and 1.2 correspond to PPO's epsilon of 0.2."""

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2

    def __post_init__(self) -> None:
        PolicyLossSettings.__post_init__(self)
        _require(
            0 <= self.clip_low_threshold <= 1 <= self.clip_high_threshold,
            "clip_low_threshold, clip_high_threshold",
            "must satisfy 0 <= low <= 1 <= high (they bound the ratio)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoSettings(ClippedSettings):
    clip_high_threshold: float = 1.28


@dataclass(frozen=True, slots=True, kw_only=True)
class DapoSettings(ClippedSettings):
    clip_high_threshold: float = 1.28
    eps_clip_c: float | None = None
    """Dual clip: the loss of a token with a negative advantage A is at most -eps_clip_c * A."""

    def __post_init__(self) -> None:
        ClippedSettings.__post_init__(self)
        _require(self.eps_clip_c is None or self.eps_clip_c > 1, "eps_clip_c", "must be above 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoSettings(ClippedSettings):
    clip_low_threshold: float = 1 - 3e-4
    clip_high_threshold: float = 1 + 4e-4
    seq_ratio_log_cap: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DroSettings(PolicyLossSettings):
    beta: float = 0.05

    def __post_init__(self) -> None:
        PolicyLossSettings.__post_init__(self)
        _require(self.beta >= 0, "beta", "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoSettings(PolicyLossSettings):
    divergence: Literal["binary_tv", "binary_kl"] = "binary_tv"
    threshold: float | None = None
    """None: 0.15 for binary_tv, 0.05 for binary_kl."""

    def __post_init__(self) -> None:
        PolicyLossSettings.__post_init__(self)
        _require(self.threshold is None or self.threshold >= 0, "threshold", "must not be negative")


def parse_settings(name: str, cls: type[LossSettings], config: Mapping[str, Any]) -> LossSettings:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key, value in config.items():
        if key not in fields:
            raise InvalidInput(
                f"loss_fn_config of {name} has no {key!r}; it has: {', '.join(fields)}"
            )
        _check_value(name, key, value, fields[key].type)
    return cls(**config)


def _check_value(name: str, key: str, value: Any, expected: Any) -> None:
    where = f"loss_fn_config.{key} of {name}"
    choices = getattr(expected, "__args__", ())
    if expected is bool:
        if not isinstance(value, bool):
            raise InvalidInput(f"{where} must be true or false, not {value!r}")
    elif choices and all(isinstance(choice, str) for choice in choices):
        if value not in choices:
            raise InvalidInput(f"{where} must be one of {', '.join(choices)}, not {value!r}")
    elif value is None and type(None) in choices:
        pass
    elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(f"{where} must be a finite number, not {value!r}")


def _require(condition: bool, key: str, rule: str) -> None:
    if not condition:
        raise InvalidInput(f"loss_fn_config.{key} {rule}")
