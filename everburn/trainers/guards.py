"""The checks of a session by which a damaged one, or an unfit one, is found before it does harm.

Capabilities: what a configuration asks for, against what the session says it can do, once it is
open and before anything is trained (which setting needs what: learning/losses.py). Finite results:
a NaN that a trainer reports is in its gradients or in its weights by then, and whatever is saved
afterwards has it too. The tally of gradients: they accumulate in the trainer's memory, and an
update takes whatever is there; of some that were lost meanwhile nothing else tells.

Doesn't own what follows: the lease ends, and after three losses at one step the step itself is
suspected.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from everburn.config import Entrypoint, RunConfig
from everburn.learning.losses import Need, needs
from everburn.trainers.protocol import (
    Gradients,
    TrainerFailedError,
    TrainerStateLostError,
    TrainerUnfitError,
)

if TYPE_CHECKING:
    from everburn.learning.datums import Datum


def check_capabilities(config: RunConfig, client: object) -> None:
    """Compare with the flags that create_model's answer has left on the SDK's client.

    Raises:
        TrainerUnfitError: naming every flag that is missing, and what needs it.
    """
    missing = [need for need in needed(config) if getattr(client, need.flag, None) is not True]
    if missing:
        lacks = "; ".join(f"{need.what} needs {need.flag}" for need in missing)
        raise TrainerUnfitError(
            f"the trainer of {config.base_model} doesn't advertise what the run asks for: {lacks}. "
            "Change the setting, or train where it is supported"
        )


def needed(config: RunConfig) -> list[Need]:
    """The capabilities that a configuration asks for."""
    found: list[Need] = []
    if not isinstance(config.loss, Entrypoint):
        found += needs(config.loss, config.loss_config)
    if config.router_replay:
        found.append(Need("supports_router_replay", "router_replay (a model with experts)"))
    return found


def require_finite_gradients(gradients: Gradients) -> Gradients:
    """Raises TrainerFailedError: their loss or a logprob is NaN or infinite."""
    require_finite_metrics("forward_backward", gradients.metrics)
    require_finite_logprobs("forward_backward", gradients.logprobs)
    return gradients


def require_finite_logprobs(operation: str, logprobs: list[list[float]]) -> list[list[float]]:
    """Raises TrainerFailedError: one of them is NaN or infinite."""
    for number, values in enumerate(logprobs):
        _require(operation, f"a logprob of datum {number}", values)
    return logprobs


def require_finite_metrics(operation: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Raises TrainerFailedError: one of them is NaN or infinite."""
    for name, value in metrics.items():
        _require(operation, name, [value])
    return metrics


def _require(operation: str, what: str, values: Sequence[float]) -> None:
    for value in values:
        if not math.isfinite(value):
            raise TrainerFailedError(
                f"{operation}: {what} is {value}: gradients or weights of this session aren't "
                "finite any more, and nothing is saved of it"
            )


class Tally:
    """What was sent since the last update. A trainer that divides by the number of sequences knows
    it, and where it reports it with the update (`num_sequences`, as the emulator does; whether
    Fireworks does isn't known), it is compared."""

    def __init__(self) -> None:
        self._sent: int | None = 0
        """Datums with anything to learn from; None where that can't be told."""

    def add(self, datums: Sequence["Datum"]) -> None:
        """Gradients of these are on their way."""
        if self._sent is not None:
            self._sent += sum(bool(datum.advantages.any()) for datum in datums)

    def lose_count(self) -> None:
        """Nothing is compared at the next update."""
        self._sent = None

    def clear(self) -> None:
        """Nothing is accumulated."""
        self._sent = 0

    def settle(self, metrics: dict[str, float]) -> None:
        """An update has taken what was accumulated, and reports this.

        Raises:
            TrainerStateLostError: it was made of something else than what was sent.
        """
        sent, self._sent = self._sent, 0
        taken = metrics.get("num_sequences")
        if sent is not None and taken is not None and taken != sent:
            raise TrainerStateLostError(
                f"the trainer's update was made of {taken:g} sequences, and {sent} were sent: "
                "gradients were lost, or come from somebody else"
            )
