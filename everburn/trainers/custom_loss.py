"""A run's own loss, in the form that the SDK's `forward_backward_custom` takes.

The SDK scores the datums, differentiates the loss here with respect to the logprobs, and sends the
gradient to the trainer as the weights of a linear loss. Owns the call of the user's function and
every check of what it returns, before anything reaches the trainer. Doesn't own the requests (the
SDK's) or their order (serverless.py).
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from everburn.config import Entrypoint
from everburn.entrypoints import call
from everburn.learning.datums import Datum
from everburn.trainers import TrainerRejectedError

if TYPE_CHECKING:
    from torch import Tensor

MAX_METRICS = 16
MAX_METRIC_NAME = 40


class CustomLoss:
    """`loss(data, logprobs, **kwargs) -> (loss, metrics)`, for one `forward_backward_custom`.

    data: Everburn's datums, with arrays `targets`, `logprobs` (of the rollout), `advantages` and
    `mask` (learning/datums.py). logprobs: one float32 tensor per datum, as long as its arrays, of
    the policy that is trained. loss: a scalar tensor, summed over tokens, as built-in losses are
    (the optimizer step normalises). metrics: a dict of numbers.

    value and metrics: what the function returned, once it has been called.
    """

    def __init__(self, entrypoint: Entrypoint, datums: list[Datum]) -> None:
        self._entrypoint = entrypoint
        self._datums = datums
        self.value = 0.0
        self.metrics: dict[str, float] = {}

    def __call__(
        self, data: Sequence[object], logprobs: list["Tensor"]
    ) -> tuple["Tensor", dict[str, float]]:
        """For the SDK: a loss with the gradient of the user's, within the mask.

        data: the SDK's datums, which don't carry advantages; the user's function gets ours.
        It is linear, so that what the SDK sends has been looked at here: a NaN that reached the
        trainer would make the client unusable for good.

        Raises:
            TrainerRejectedError: the function failed, or returned what can't be trained on.
        """
        import torch

        try:
            result = call(self._entrypoint, self._datums, logprobs)
        except Exception as error:
            raise self._refusal(f"{type(error).__name__}: {error}") from error
        loss = self._checked(result)
        if not loss.requires_grad:
            raise self._refusal("the loss doesn't depend on the logprobs it was given")
        gradients = torch.autograd.grad(loss, logprobs, allow_unused=True)
        # One zero-weighted sum over all, so that each has a gradient, also where none is due.
        linear = sum((0.0 * values.sum() for values in logprobs), start=torch.zeros(()))
        for index, (gradient, values, datum) in enumerate(
            zip(gradients, logprobs, self._datums, strict=True)
        ):
            if gradient is None:
                continue
            if not torch.isfinite(gradient).all():
                raise self._refusal(f"the gradient of datum {index} isn't finite")
            linear = linear + (gradient * torch.from_numpy(datum.mask) * values).sum()
        self.value = float(loss.detach())
        return linear, {}

    def _checked(self, result: Any) -> "Tensor":
        import torch

        if not isinstance(result, tuple) or len(result) != 2:
            raise self._refusal(f"returned {type(result).__name__}, not (loss, metrics)")
        loss, metrics = result
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise self._refusal("the loss isn't a tensor of one number")
        if not torch.isfinite(loss).all():
            raise self._refusal(f"the loss is {loss.item()}")
        if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
            raise self._refusal(f"metrics must be a dict of at most {MAX_METRICS} numbers")
        for name, value in metrics.items():
            number = value.item() if isinstance(value, torch.Tensor) else value
            if not isinstance(number, int | float) or not math.isfinite(number):
                raise self._refusal(f"metric {name!r} is {value!r}, not a finite number")
            if len(str(name)) > MAX_METRIC_NAME:
                raise self._refusal(f"metric {name!r} has more than {MAX_METRIC_NAME} characters")
            self.metrics[str(name)] = float(number)
        return loss.reshape(())

    def _refusal(self, problem: str) -> TrainerRejectedError:
        return TrainerRejectedError(f"loss {self._entrypoint.name}: {problem}")
