"""A Python loss: from the logprobs of datums to the weights of a linear loss.

As in the SDK's `forward_backward_custom`, the loss is differentiated here with respect to the
logprobs, and the trainer gets the gradient. Owns the call and the checks of the user's function.
Doesn't own the requests (serverless.py) or its deadline (usercode/limits.py).
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from everburn.config import Entrypoint
from everburn.learning.datums import Datum
from everburn.trainers.protocol import TrainerRejectedError
from everburn.usercode.entrypoints import call
from everburn.usercode.limits import UserCodeStuckError, limited
from everburn.usercode.threads import in_thread

if TYPE_CHECKING:
    from torch import Tensor

MAX_METRICS = 16
MAX_METRIC_NAME = 40


class CustomLoss:
    """`loss(data, logprobs, **kwargs) -> (loss, metrics)`, for one `forward_backward`.

    data: datums with arrays `targets`, `logprobs` (of the rollout), `advantages` and `mask`
    (learning/datums.py). logprobs: one float32 tensor per datum, of the same length, under the
    trained policy. loss: a scalar tensor, summed over tokens as built-in losses are (the optimizer
    step normalizes). metrics: a dict of numbers.

    value, metrics: the function's result, after the call.
    """

    def __init__(self, entrypoint: Entrypoint, datums: list[Datum]) -> None:
        self._entrypoint = entrypoint
        self._datums = datums
        self.value = 0.0
        self.metrics: dict[str, float] = {}

    async def weights(self, scored: list[list[float]]) -> list[npt.NDArray[np.float32]]:
        """Call the function on its own thread, and differentiate its loss.

        scored: per datum, the logprob of each target under the current weights. Returns arrays w of
        the same shape: the sum of -w * logprob has the gradient of the user's loss within the mask
        and none outside. They are finite: a NaN would make the SDK's client unusable.

        Raises:
            TrainerRejectedError: the function failed, exited, didn't return, or its result is
                invalid.
        """
        try:
            return await limited(in_thread(lambda: self._weights(scored)))
        except UserCodeStuckError as error:
            raise self._refusal(str(error)) from None

    def _weights(self, scored: list[list[float]]) -> list[npt.NDArray[np.float32]]:
        import torch

        logprobs = [
            torch.tensor(values, dtype=torch.float32, requires_grad=True) for values in scored
        ]
        try:
            loss = self._checked(call(self._entrypoint, self._datums, logprobs))
            gradients = torch.autograd.grad(
                loss, logprobs, allow_unused=True, materialize_grads=True
            )
        except TrainerRejectedError:
            raise
        except BaseException as error:
            # Includes SystemExit, which would end the worker.
            raise self._refusal(f"{type(error).__name__}: {error}") from error
        for index, gradient in enumerate(gradients):
            if not torch.isfinite(gradient).all():
                raise self._refusal(f"the gradient of datum {index} isn't finite")
        self.value = float(loss.detach())
        return [
            -gradient.numpy() * datum.mask
            for gradient, datum in zip(gradients, self._datums, strict=True)
        ]

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
        if not loss.requires_grad:
            raise self._refusal("the loss doesn't depend on the logprobs")
        return loss.reshape(())

    def _refusal(self, problem: str) -> TrainerRejectedError:
        return TrainerRejectedError(f"loss {self._entrypoint.name}: {problem}")
