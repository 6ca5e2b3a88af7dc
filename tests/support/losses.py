"""Losses and advantage functions for configurations in tests."""

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from everburn.learning.datums import Datum


def importance_sampling(
    data: list[Datum], logprobs: list[torch.Tensor], scale: float = 1.0
) -> tuple[torch.Tensor, dict[str, float]]:
    """-r A, summed: a local copy of the service's loss of this name."""
    total = torch.zeros(())
    for datum, own in zip(data, logprobs, strict=True):
        advantages, rollout = torch.from_numpy(datum.advantages), torch.from_numpy(datum.logprobs)
        mask = torch.from_numpy(datum.mask)
        total = total - (mask * (own - rollout).exp() * advantages * scale).sum()
    return total, {"datums": len(data), "scale": torch.tensor(scale)}


def every_token(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    """Ignores the loss mask."""
    return -sum(own.sum() for own in logprobs), {}


def first_only(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return -logprobs[0].sum(), {}


def raising(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    raise KeyError("margin")


def exiting(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    sys.exit("no more of this")


class Block:
    """Controls `blocking`: it sets `begun`, then blocks its thread until `free` is set."""

    def __init__(self) -> None:
        self.begun, self.free = threading.Event(), threading.Event()


block = Block()
"""A test that runs `blocking` replaces this, and sets its `free`."""


def blocking(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    now = block
    now.begun.set()
    now.free.wait(60)
    return importance_sampling(data, logprobs)


def overwriting(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    """An in-place change, which makes torch's backward pass fail."""
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
