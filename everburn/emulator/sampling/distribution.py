"""The distribution that a token is drawn from, and the draw: pure functions over logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY = 1e-5
"""Temperatures below this choose the most likely token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int | None = None
    stop: Sequence[str] = ()
    echo: bool = False
    """Return the prompt's tokens and log-probabilities, too."""


def draw_tokens(
    logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at `uniform`.

    `logits` is [rows, vocabulary], `uniform` float64 [rows] in [0, 1). A row's distribution is
    softmax(logits / temperature), restricted to the `top_k` most likely tokens and then to the
    smallest set whose probability reaches `top_p`, and renormalized.

    Returns token ids, their log-probability under softmax(logits), and under that distribution (0
    for greedy rows).
    """
    raw = logits.float().log_softmax(-1)
    if all(_is_plain(row) for row in params):
        tokens = _invert(raw, uniform)
        logprob = raw.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return tokens, logprob, logprob
    greedy = torch.tensor([row.temperature < GREEDY for row in params])
    temperature = torch.tensor([max(row.temperature, GREEDY) for row in params])
    scaled = (raw / temperature.unsqueeze(-1)).log_softmax(-1)
    scaled = _keep_top_k(scaled, torch.tensor([row.top_k for row in params]))
    scaled = _keep_top_p(scaled, torch.tensor([row.top_p for row in params]))
    scaled = scaled.log_softmax(-1)
    tokens = torch.where(greedy, raw.argmax(-1), _invert(scaled, uniform))
    chosen = tokens.unsqueeze(-1)
    sampling_logprob = scaled.gather(-1, chosen).squeeze(-1).masked_fill(greedy, 0.0)
    return tokens, raw.gather(-1, chosen).squeeze(-1), sampling_logprob


def _is_plain(params: SamplingParams) -> bool:
    return params.temperature == 1 and params.top_p >= 1 and params.top_k == 0


def _invert(logprobs: Tensor, uniform: Tensor) -> Tensor:
    cumulative = logprobs.double().exp().cumsum(-1)
    total = cumulative[:, -1]
    # Strictly below the total, so that the search never ends behind the last possible token.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)


def _keep_top_k(logprobs: Tensor, top_k: Tensor) -> Tensor:
    order = logprobs.argsort(-1, descending=True)
    limit = torch.where(top_k > 0, top_k, logprobs.shape[-1])
    return _mask_ranked(logprobs, order, torch.arange(logprobs.shape[-1]) >= limit.unsqueeze(-1))


def _keep_top_p(logprobs: Tensor, top_p: Tensor) -> Tensor:
    ranked, order = logprobs.softmax(-1).sort(-1, descending=True)
    before = ranked.cumsum(-1) - ranked
    return _mask_ranked(
        logprobs, order, (before >= top_p.unsqueeze(-1)) & (top_p < 1).unsqueeze(-1)
    )


def _mask_ranked(logprobs: Tensor, order: Tensor, outside: Tensor) -> Tensor:
    """Exclude the tokens order[row, rank] for which outside[row, rank]."""
    mask = torch.zeros_like(outside).scatter(-1, order, outside)
    return logprobs.masked_fill(mask, -torch.inf)
