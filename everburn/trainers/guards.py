"""Guards that detect an unfit or damaged session before it does harm.

Capabilities: a new session's against the configuration's needs (learning/losses.py). Finite
results: a NaN in a result is also in gradients or weights, and would be in anything saved
afterwards. Gradient count: nothing else shows that accumulated gradients were lost. Doesn't own the
reactions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
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
    """Check the flags that create_model has set on the SDK's client. Raises TrainerUnfitError,
    which names each missing flag and the setting that needs it."""
    missing = [need for need in _needs(config) if getattr(client, need.flag, None) is not True]
    if missing:
        reasons = "; ".join(f"{need.what} needs {need.flag}" for need in missing)
        raise TrainerUnfitError(
            f"the trainer of {config.base_model} doesn't advertise what the run needs: {reasons}. "
            "Change the setting, or use a trainer that supports it"
        )


def _needs(config: RunConfig) -> Iterator[Need]:
    if not isinstance(config.loss, Entrypoint):
        yield from needs(config.loss, config.loss_config)
    if config.router_replay:
        yield Need("supports_router_replay", "router_replay (a model with experts)")


def require_finite_gradients(gradients: Gradients) -> Gradients:
    """Raises TrainerFailedError if a metric or a logprob isn't finite."""
    require_finite_metrics("forward_backward", gradients.metrics)
    require_finite_logprobs("forward_backward", gradients.logprobs)
    return gradients


def require_finite_logprobs(operation: str, logprobs: list[list[float]]) -> list[list[float]]:
    """Raises TrainerFailedError if a logprob isn't finite."""
    for index, values in enumerate(logprobs):
        _require(operation, f"a logprob of datum {index}", values)
    return logprobs


def require_finite_metrics(operation: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Raises TrainerFailedError if a metric isn't finite."""
    for name, value in metrics.items():
        _require(operation, name, [value])
    return metrics


def _require(operation: str, what: str, values: Sequence[float]) -> None:
    for value in values:
        if not math.isfinite(value):
            raise TrainerFailedError(
                f"{operation}: {what} is {value}: the session's gradients or weights aren't "
                "finite, and nothing of it is saved"
            )


class GradientCount:
    """Count of gradients sent since the last update, compared with `num_sequences` of the update if
    the trainer reports it (the emulator does; unknown for Fireworks)."""

    def __init__(self) -> None:
        self._sent: int | None = 0
        """Datums with a non-zero advantage; None if unknown."""

    def add(self, datums: Sequence["Datum"]) -> None:
        if self._sent is not None:
            self._sent += sum(bool(datum.advantages.any()) for datum in datums)

    def skip(self) -> None:
        """Don't compare at the next update."""
        self._sent = None

    def check_update(self, metrics: dict[str, float]) -> None:
        """Compare with the metrics of an update, and start again at zero.

        Raises:
            TrainerStateLostError: the update used another number of sequences.
        """
        sent, self._sent = self._sent, 0
        used = metrics.get("num_sequences")
        if sent is not None and used is not None and used != sent:
            raise TrainerStateLostError(
                f"the trainer's update was made of {used:g} sequences, and {sent} were sent: "
                "gradients were lost, or another holder sent some"
            )
