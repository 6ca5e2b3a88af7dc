"""Losses and advantage functions that runs of tests name."""

import sys
import threading
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


def exiting(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    sys.exit("no more of this")


class Block:
    """What `blocking` does: from `begun` on it blocks its thread until it is `free`."""

    def __init__(self) -> None:
        self.begun, self.free = threading.Event(), threading.Event()


block = Block()
"""A test that runs `blocking` puts a new one here, and frees it."""


def blocking(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    now = block
    now.begun.set()
    now.free.wait(60)
    return importance_sampling(data, logprobs)


def overwriting(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    """What torch complains of when it differentiates."""
    square = logprobs[0].exp()
    loss = square.square().sum()
    square.zero_()
    return loss, {}


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
