"""The protocol of a trainer session: its operations, their results, their errors."""

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from everburn.config import Entrypoint
from everburn.learning.losses import LossConfig
from everburn.records.ledger import AdamParams

if TYPE_CHECKING:
    from everburn.learning.datums import Datum


class TrainerError(Exception):
    """Base of what a trainer session raises."""


class TrainerStateLostError(TrainerError):
    """The session is gone, or an operation may or may not have been applied. The lease ends."""


class TrainerFailedError(TrainerStateLostError):
    """The service answered an operation with a failure of its own, or with numbers that are not
    finite. The lease ends; on another lease the same operation is likely to fail again."""


class TrainerRejectedError(TrainerError):
    """The trainer refused a request as invalid; its state is untouched. The same request would be
    refused again."""


class TrainerUnfitError(TrainerError):
    """A session was to be had, but it can't do what the run's configuration asks for. Says what is
    missing; asking again won't help."""


class TrainerUnavailableError(TrainerError):
    """No session can be had at the moment: the server isn't reachable, or fails."""


class TrainerCapacityError(TrainerUnavailableError):
    """No session can be had for lack of capacity. Worth waiting for."""


class TrainerClosedError(TrainerError):
    """The account may not train: the lease ends, and no other is to be had before a person has
    mended that."""


class QuotaExceededError(TrainerClosedError):
    """The account's quota is used up."""


class KeyRefusedError(TrainerClosedError):
    """The API key is missing, invalid, or lacks a permission. Names the variable."""


class PromotionError(TrainerError):
    """Nobody knows whether a snapshot was made a model of the account; the session is unharmed."""


class PromotionRefusedError(PromotionError):
    """No model was made. Asking again may help."""


class ModelIdTakenError(PromotionError):
    """A model of that id is there, and not by this run. Asking again won't help."""


class PublicationMismatchError(TrainerError):
    """The sampler doesn't serve what was trained: its log-probabilities of a recorded completion
    differ from the trainer's."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """What one `forward_backward` request did.

    metrics: of the trainer, `loss:sum` among them. logprobs: per datum, of each target under the
    trainer's current weights. loss_metrics: what a Python loss returned beside its loss.
    """

    metrics: dict[str, float]
    logprobs: list[list[float]]
    loss_metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Sampler weights: `path` names them, `handle` opens a sampler on them (no credentials);
    `shared` where the handle serves whatever was published last."""

    path: str
    handle: str
    shared: bool = False


class Trainer(Protocol):
    """One trainer session. Operations are applied in the order in which they are called.

    Every method may raise TrainerStateLostError, TrainerRejectedError and TrainerClosedError.
    """

    @property
    def session(self) -> str:
        """The session's id, for people who look for it at the service."""
        ...

    def forward_backward(
        self, datums: "list[Datum]", loss: str | Entrypoint, loss_config: LossConfig
    ) -> Awaitable[Gradients]:
        """Add the gradients of `datums` to what the session has accumulated.

        loss: a loss of the service by its name in a configuration, or a Python function.
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

    async def score_twice(
        self, snapshot: Snapshot, tokens: list[int]
    ) -> tuple[list[float], list[float]]:
        """The logprob of each token after the first, under the session's current weights, and as a
        sampler of the snapshot computes it.

        Raises TrainerStateLostError where the snapshot isn't served.
        """
        ...

    async def promote(self, snapshot: str, model_id: str, *, again: bool) -> str:
        """Make a model of the account from a snapshot, by its path; returns the model's name.

        again: an earlier try may have succeeded unseen: a model that exists is it.

        Raises PromotionError and its kinds, which tell whether there may be a model now.
        """
        ...

    async def save_checkpoint(self, name: str) -> str:
        """Save weights and optimizer; returns the reference that loads them."""
        ...

    async def load_checkpoint(self, path: str) -> None:
        """Replace weights and optimizer by a saved state."""
        ...

    async def load_adapter(self, path: str) -> None:
        """Replace the adapter's weights; the optimizer starts anew."""
        ...

    async def probe(self) -> None:
        """Return if the session lives."""
        ...

    async def close(self) -> None:
        """Give the session back. Never raises."""
        ...
