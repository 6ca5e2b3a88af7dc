"""The nine built-in losses of the service, each a pure function over one micro-batch.

The loss of a request is the sum over all positions (`optim_step` normalizes, see engine.py). The
service doesn't publish the settings of dro, dapo, gspo, dppo and reinforce: their keys
(loss_settings.py) are those of the public Fireworks cookbook, their formulas those of the papers.

Notation: pi is the policy being trained, q the distribution that sampled the token (its recorded
log-probabilities come with the data), A the advantage, sg() a stop-gradient and
r = exp(log pi - log anchor). The anchor is q or, if `anchor_logprob_source` is "current_detached",
sg(pi): then r is 1, and `weighting` corrects for the distance between pi and q.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everburn.emulator.errors import InvalidInput
from everburn.emulator.training.loss_settings import (
    CispoSettings,
    ClippedSettings,
    DapoSettings,
    DppoSettings,
    DroSettings,
    GspoSettings,
    LossSettings,
    PolicyLossSettings,
    parse_settings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """One padded micro-batch; every tensor is [rows, width]."""

    logprobs: Tensor
    """log pi of each target token, float32, differentiable."""
    anchor: Tensor
    """log-probability in the ratio's denominator, float32, without gradient."""
    weights: Tensor
    """Advantages, or the weights of cross_entropy, float32; zero at untrained positions."""
    trained: Tensor
    """bool: positions whose weight isn't zero."""

    def ratio(self, log_cap: float) -> Tensor:
        """r, its logarithm clamped to +-log_cap so that exp() stays finite."""
        return (self.logprobs - self.anchor).clamp(-log_cap, log_cap).exp()


def cross_entropy(terms: Terms, settings: LossSettings) -> Tensor:
    """L = -w log pi.

    w may be any real number: `forward_backward_custom` sends the gradient of a client's own loss
    as w.
    """
    return -terms.weights * terms.logprobs


def importance_sampling(terms: Terms, settings: PolicyLossSettings) -> Tensor:
    """L = -r A.

    Tinker documentation, "importance_sampling": the off-policy policy gradient, unclipped.
    """
    return -terms.ratio(settings.ratio_log_cap) * terms.weights


def ppo(terms: Terms, settings: ClippedSettings) -> Tensor:
    """L = -min(r A, clip(r, low, high) A).

    Schulman et al. 2017, arXiv:1707.06347, equation 7. With group advantages: clipped GRPO (Shao
    et al. 2024, arXiv:2402.03300).
    """
    ratio = terms.ratio(settings.ratio_log_cap)
    clipped = ratio.clamp(settings.clip_low_threshold, settings.clip_high_threshold)
    return -torch.minimum(ratio * terms.weights, clipped * terms.weights)


def cispo(terms: Terms, settings: CispoSettings) -> Tensor:
    """L = -sg(clip(r, low, high)) A log pi.

    MiniMax-M1, arXiv:2506.13585, equation 4: the clipped ratio is a weight, so every token keeps
    its gradient.
    """
    ratio = terms.ratio(settings.ratio_log_cap)
    clipped = ratio.clamp(settings.clip_low_threshold, settings.clip_high_threshold)
    return -clipped.detach() * terms.weights * terms.logprobs


def dro(terms: Terms, settings: DroSettings) -> Tensor:
    """L = -(A log pi - beta/2 (log pi - log anchor)^2), on trained positions only.

    Richemond et al. 2024, arXiv:2405.19107, in the per-token form of the Tinker documentation. The
    recorded logprobs of a prompt are padding, so the penalty is masked by `trained`.
    """
    distance = terms.logprobs - terms.anchor
    penalty = 0.5 * settings.beta * distance.square() * terms.trained
    return penalty - terms.weights * terms.logprobs


def dapo(terms: Terms, settings: DapoSettings) -> Tensor:
    """L = -min(r A, clip(r, low, high) A); with eps_clip_c = c, at most -c A where A < 0.

    Yu et al. 2025, arXiv:2503.14476 (asymmetric bounds), with the dual clip of Ye et al. 2019,
    arXiv:1912.09729, equation 4. DAPO's dynamic sampling and normalization belong to the caller.
    """
    clipped = ppo(terms, settings)
    if settings.eps_clip_c is None:
        return clipped
    bounded = torch.minimum(clipped, -settings.eps_clip_c * terms.weights)
    return torch.where(terms.weights < 0, bounded, clipped)


def gspo(terms: Terms, settings: GspoSettings) -> Tensor:
    """L = -min(s A, clip(s, low, high) A) / |y|, s = sg(exp(mean(log pi - log anchor))) pi /
    sg(pi).

    Zheng et al. 2025, arXiv:2507.18071, GSPO-token (equation 13): one ratio per sequence, the
    geometric mean over its |y| trained tokens, with a gradient through each token.
    """
    length = terms.trained.sum(-1, keepdim=True).clamp(min=1)
    log_ratio = (terms.logprobs - terms.anchor) * terms.trained
    sequence = (log_ratio.sum(-1, keepdim=True) / length).detach()
    token = sequence + terms.logprobs - terms.logprobs.detach()
    ratio = token.clamp(max=settings.seq_ratio_log_cap).exp()
    clipped = ratio.clamp(settings.clip_low_threshold, settings.clip_high_threshold)
    return -torch.minimum(ratio * terms.weights, clipped * terms.weights) / length


def dppo(terms: Terms, settings: DppoSettings) -> Tensor:
    """L = -r A m, m = 0 where the update would widen a divergence D(anchor, pi) above threshold.

    Divergence Proximal Policy Optimization, arXiv:2602.04879. D is the divergence between the
    Bernoulli variables "this token or another": D_TV = |p_anchor - p|, or D_KL. An update widens it
    if A > 0 and r > 1, or A < 0 and r < 1.
    """
    ratio = terms.ratio(settings.ratio_log_cap)
    policy, anchor = terms.logprobs.detach().exp(), terms.anchor.exp()
    if settings.divergence == "binary_tv":
        divergence, default = (anchor - policy).abs(), 0.15
    else:
        divergence, default = _binary_kl(anchor, policy), 0.05
    threshold = default if settings.threshold is None else settings.threshold
    widening = (terms.weights > 0) & (ratio > 1) | (terms.weights < 0) & (ratio < 1)
    return -ratio * terms.weights * ~(widening & (divergence > threshold))


def reinforce(terms: Terms, settings: PolicyLossSettings) -> Tensor:
    """L = -A log pi.

    Williams 1992, doi:10.1007/BF00992696. `weighting` corrects for data that another policy
    sampled; without it the recorded logprobs aren't used.
    """
    return -terms.weights * terms.logprobs


def _binary_kl(anchor: Tensor, policy: Tensor) -> Tensor:
    eps = torch.finfo(policy.dtype).eps
    p, q = anchor.clamp(eps, 1 - eps), policy.clamp(eps, 1 - eps)
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


LossFunction = Callable[[Terms, Any], Tensor]

LOSSES: Mapping[str, tuple[LossFunction, type[LossSettings]]] = {
    "cross_entropy": (cross_entropy, LossSettings),
    "importance_sampling": (importance_sampling, PolicyLossSettings),
    "ppo": (ppo, ClippedSettings),
    "cispo": (cispo, CispoSettings),
    "dro": (dro, DroSettings),
    "dapo": (dapo, DapoSettings),
    "gspo": (gspo, GspoSettings),
    "dppo": (dppo, DppoSettings),
    "reinforce": (reinforce, PolicyLossSettings),
}


@dataclass(frozen=True, slots=True)
class Loss:
    """A built-in loss with its settings."""

    name: str
    function: LossFunction
    settings: LossSettings

    @classmethod
    def parse(cls, name: str, config: Mapping[str, Any] | None) -> "Loss":
        """Parse the wire's `loss_fn` and `loss_fn_config`. Raises InvalidInput."""
        if name not in LOSSES:
            raise InvalidInput(f"unknown loss_fn {name!r}; known: {', '.join(LOSSES)}")
        function, settings_type = LOSSES[name]
        return cls(name, function, parse_settings(name, settings_type, config or {}))

    @property
    def is_policy(self) -> bool:
        """True if the loss takes advantages and recorded logprobs instead of weights."""
        return isinstance(self.settings, PolicyLossSettings)

    @property
    def reports_diagnostics(self) -> bool:
        return (
            isinstance(self.settings, PolicyLossSettings)
            and self.settings.report_policy_diagnostics
        )

    def __call__(self, logprobs: Tensor, recorded: Tensor, weights: Tensor) -> Tensor:
        """Loss per position, [rows, width], exactly zero where `weights` is.

        All arguments are float32 [rows, width]; only `logprobs` carries gradient.
        """
        current = logprobs.detach()
        trained = weights != 0
        # Recorded logprobs of untrained positions are padding of any value. A distance of zero
        # keeps infinities, and thus NaN gradients, out of the batch.
        recorded = torch.where(trained, recorded, current)
        settings = self.settings
        if not isinstance(settings, PolicyLossSettings):
            anchor, correction = recorded, None
        else:
            detached = settings.anchor_logprob_source == "current_detached"
            anchor = current if detached or self.function is reinforce else recorded
            correction = _correction(anchor - recorded, settings)
        terms = Terms(logprobs=logprobs, anchor=anchor, weights=weights, trained=trained)
        loss = self.function(terms, settings)
        return loss if correction is None else loss * correction


def _correction(log_ratio: Tensor, settings: PolicyLossSettings) -> Tensor | None:
    """Weight of each token that corrects for the distance between the anchor and q, no gradient.

    tis: min(anchor/q, cap), truncated importance sampling (Ionides 2008,
    doi:10.1198/106186008X320456). mis: anchor/q within [1/cap, cap], else zero (masked importance
    sampling).
    """
    if settings.weighting == "none":
        return None
    ratio = log_ratio.clamp(-settings.ratio_log_cap, settings.ratio_log_cap).exp()
    cap = settings.weighting_cap
    if settings.weighting == "tis":
        return ratio.clamp(max=cap)
    return ratio * ((ratio >= 1 / cap) & (ratio <= cap))


@dataclass(slots=True)
class Diagnostics:
    """Distance between pi and q over the trained tokens of a request."""

    tokens: int = 0
    ratio_sum: float = 0.0
    ratio_max: float = -math.inf
    kl_sum: float = 0.0
    clipped: int = 0

    def add(self, loss: Loss, logprobs: Tensor, recorded: Tensor, weights: Tensor) -> None:
        trained = weights != 0
        if not trained.any():
            return
        log_ratio = (logprobs - recorded)[trained].clamp(-20, 20)
        ratio = log_ratio.exp()
        self.tokens += int(trained.sum())
        self.ratio_sum += float(ratio.sum())
        self.ratio_max = max(self.ratio_max, float(ratio.max()))
        # Schulman's k3 estimator of KL(q || pi): never negative, low variance.
        self.kl_sum += float((ratio - 1 - log_ratio).sum())
        if isinstance(loss.settings, ClippedSettings):
            low, high = loss.settings.clip_low_threshold, loss.settings.clip_high_threshold
            self.clipped += int(((ratio < low) | (ratio > high)).sum())

    def metrics(self) -> dict[str, float]:
        if not self.tokens:
            return {}
        return {
            "policy_ratio:mean": self.ratio_sum / self.tokens,
            "policy_ratio:max": self.ratio_max,
            "policy_kl:mean": self.kl_sum / self.tokens,
            "policy_outside_clip:mean": self.clipped / self.tokens,
        }
