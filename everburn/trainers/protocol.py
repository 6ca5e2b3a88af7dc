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
    """Base of the errors of a trainer session."""


class TrainerStateLostError(TrainerError):
    """The session is gone, or an operation may or may not have been applied. The lease ends."""


class TrainerFailedError(TrainerStateLostError):
    """The service answered an operation with a failure or with numbers that aren't finite. The
    lease ends; another lease is likely to fail in the same way."""


class TrainerRejectedError(TrainerError):
    """The trainer refused an invalid request; its state is unchanged. A retry would be refused."""


class TrainerUnfitError(TrainerError):
    """The trainer can't do what the configuration needs. Names what is missing; a retry won't
    help."""


class TrainerUnavailableError(TrainerError):
    """No session is available now: the server is unreachable or failing."""


class TrainerCapacityError(TrainerUnavailableError):
    """No session is available for lack of capacity. Worth waiting for."""


class TrainerClosedError(TrainerError):
    """The account may not train: the lease ends, and no other is available until a person fixes
    the account."""


class QuotaExceededError(TrainerClosedError):
    """The account's quota is used up."""


class KeyRefusedError(TrainerClosedError):
    """The API key is missing, invalid or lacks a permission. Names the variable."""


class PromotionError(TrainerError):
    """It is unknown whether the model was created. The session isn't affected."""


class PromotionRefusedError(PromotionError):
    """No model was created. A retry may help."""


class ModelIdTakenError(PromotionError):
    """A model of that id exists and isn't this run's. A retry won't help."""


class PublicationMismatchError(TrainerError):
    """The sampler's logprobs of a recorded completion differ from the trainer's."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """The result of one `forward_backward` request.

    metrics: the trainer's, including `loss:sum`. logprobs: per datum and target, under the current
    weights. loss_metrics: those that a Python loss returned.
    """

    metrics: dict[str, float]
    logprobs: list[list[float]]
    loss_metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Sampler weights. path: their name. handle: opens a sampler (no credentials). shared: the
    handle serves the latest published snapshot, not this one."""

    path: str
    handle: str
    shared: bool = False


class Trainer(Protocol):
    """One trainer session. Operations are applied in the order of the calls.

    Each method may raise TrainerStateLostError, TrainerRejectedError and TrainerClosedError.
    """

    @property
    def session(self) -> str:
        """The session's id at the service, for people."""

    def forward_backward(
        self, datums: "list[Datum]", loss: str | Entrypoint, loss_config: LossConfig
    ) -> Awaitable[Gradients]:
        """Add the gradients of `datums` to the accumulated ones.

        loss: the name of a built-in loss, or a Python function. The call determines the request's
        place in the order; the awaitable is its result.
        """

    async def forward(self, sequences: list[list[int]]) -> list[list[float]]:
        """Per sequence, the logprob of each token after the first under the current weights."""

    async def optim_step(self, adam: AdamParams) -> dict[str, float]:
        """Apply and clear the accumulated gradients. Returns metrics."""

    async def publish(self, name: str) -> Snapshot:
        """Make the current weights available to samplers."""

    async def score_twice(
        self, snapshot: Snapshot, tokens: list[int]
    ) -> tuple[list[float], list[float]]:
        """The logprob of each token after the first, by the trainer's current weights and by a
        sampler of the snapshot. Raises TrainerStateLostError if the snapshot isn't served."""

    async def promote(self, snapshot: str, model_id: str, *, again: bool) -> str:
        """Make a snapshot (by its path) a model of the account; returns the model's name.

        again: an earlier attempt may have succeeded, so an existing model is taken for its result.
        Raises PromotionError and its subclasses.
        """

    async def save_checkpoint(self, name: str) -> str:
        """Save weights and optimizer; returns the path to load them."""

    async def load_checkpoint(self, path: str) -> None:
        """Load weights and optimizer."""

    async def load_adapter(self, path: str) -> None:
        """Load the adapter's weights and reset the optimizer."""

    async def probe(self) -> None:
        """Return if the session is alive."""

    async def close(self) -> None:
        """Release the session. Never raises."""
