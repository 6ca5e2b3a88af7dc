"""Trainer sessions: what a step does to a remote model, behind one protocol.

Owns the protocol, its results and its errors. `serverless.py` speaks to the Fireworks serverless
API (and to the emulator) through the SDK; `lease.py` makes one session safe to drive by
at-least-once activities.
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from everburn.learning.datums import Datum
from everburn.ledger import AdamParams


class TrainerError(Exception):
    """Base of what a trainer session raises."""


class TrainerStateLostError(TrainerError):
    """The session is gone, or an operation may or may not have been applied. The lease ends."""


class TrainerRejectedError(TrainerError):
    """The trainer refused a request as invalid; its state is untouched. The same request would be
    refused again."""


class TrainerUnavailableError(TrainerError):
    """No session can be had: server not reachable, key refused, model unknown. Says which."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """What one `forward_backward` request did.

    metrics: of the trainer, `loss:sum` among them. logprobs: per datum, of each target under the
    trainer's current weights.
    """

    metrics: dict[str, float]
    logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Sampler weights: `path` names them, `handle` opens a sampler on them (no credentials);
    `shared` where the handle serves whatever was published last."""

    path: str
    handle: str
    shared: bool = False


class Trainer(Protocol):
    """One trainer session. Operations are applied in the order in which they are called.

    Every method may raise TrainerStateLostError and TrainerRejectedError.
    """

    @property
    def session(self) -> str:
        """The session's id, for people who look for it at the service."""
        ...

    def forward_backward(
        self, datums: list[Datum], loss: str, loss_config: dict[str, float | str | bool]
    ) -> Awaitable[Gradients]:
        """Add the gradients of `datums` to what the session has accumulated.

        The call itself takes the request's place in the order; the awaitable is its outcome.
        """
        ...

    async def forward(self, sequences: list[list[int]]) -> list[list[float]]:
        """Per sequence of token ids, the logprob of each token after the first, under the
        session's current weights. Changes nothing."""
        ...

    async def optim_step(self, adam: AdamParams) -> dict[str, float]:
        """One optimizer step over the accumulated gradients, which it clears. Returns metrics."""
        ...

    async def publish(self, name: str) -> Snapshot:
        """Make the current weights available to samplers under `name`."""
        ...

    async def save_checkpoint(self, name: str) -> str:
        """Save weights and optimizer; returns the reference that loads them."""
        ...

    async def load_checkpoint(self, path: str) -> None:
        """Replace weights and optimizer by a saved state."""
        ...

    async def probe(self) -> None:
        """Return if the session lives."""
        ...

    async def close(self) -> None:
        """Give the session back. Never raises."""
        ...
