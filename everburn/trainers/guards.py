"""The refusal of results that aren't finite.

A NaN that a trainer reports is in its gradients or in its weights by then, and whatever is saved
afterwards has it too. Owns what counts as such a result; what follows is that of any lost session:
the last good checkpoint, and after three losses at one step the step itself is suspected.
"""

import math
from collections.abc import Mapping, Sequence

from everburn.trainers.protocol import Gradients, TrainerStateLostError


def require_finite_gradients(gradients: Gradients) -> Gradients:
    """Raises TrainerStateLostError: their loss or a logprob is NaN or infinite."""
    require_finite_metrics("forward_backward", gradients.metrics)
    require_finite_logprobs("forward_backward", gradients.logprobs)
    return gradients


def require_finite_logprobs(operation: str, logprobs: list[list[float]]) -> list[list[float]]:
    """Raises TrainerStateLostError: one of them is NaN or infinite."""
    for number, values in enumerate(logprobs):
        _require(operation, f"a logprob of datum {number}", values)
    return logprobs


def require_finite_metrics(operation: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Raises TrainerStateLostError: one of them is NaN or infinite."""
    for name, value in metrics.items():
        _require(operation, name, [value])
    return metrics


def _require(operation: str, what: str, values: Sequence[float]) -> None:
    for value in values:
        if not math.isfinite(value):
            raise TrainerStateLostError(
                f"{operation}: {what} is {value}: gradients or weights of this session aren't "
                "finite any more, and nothing is saved of it"
            )
