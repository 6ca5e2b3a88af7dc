"""Losses and advantage functions that runs of tests name."""

from collections.abc import Sequence
from typing import Any

import torch

from everburn.learning.datums import Datum


def importance_sampling(
    data: list[Datum], logprobs: list[torch.Tensor], scale: float = 1.0
) -> tuple[torch.Tensor, dict[str, float]]:
    """-r A, summed: the service's loss of that name, written here."""
    total = torch.zeros(())
    for datum, own in zip(data, logprobs, strict=True):
        advantages, rollout = torch.from_numpy(datum.advantages), torch.from_numpy(datum.logprobs)
        mask = torch.from_numpy(datum.mask)
        total = total - (mask * (own - rollout).exp() * advantages * scale).sum()
    return total, {"datums": len(data), "scale": torch.tensor(scale)}


def every_token(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    """Forgets about the mask."""
    return -sum(own.sum() for own in logprobs), {}


def first_only(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return -logprobs[0].sum(), {}


def raising(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    raise KeyError("margin")


def without_metrics(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return -logprobs[0].sum()


def detached(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return torch.tensor(1.0), {}


def nan_loss(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return logprobs[0].sum() * float("nan"), {}


def nan_gradient(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return (logprobs[0] - logprobs[0].detach()).abs().sqrt().sum(), {}


def per_token(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return -logprobs[0], {}


def reward_itself(rewards: Sequence[float], baseline: float = 0.0) -> list[float]:
    return [reward - baseline for reward in rewards]


def nothing(rewards: Sequence[float]) -> list[float]:
    return [0.0] * len(rewards)


def too_few(rewards: Sequence[float]) -> list[float]:
    return [1.0]


def no_list(rewards: Sequence[float]) -> Any:
    return None
