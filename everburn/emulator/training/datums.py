"""Training data: from the wire's JSON to padded micro-batches.

Owns the checks of shape, range and finiteness of a request, and its split into micro-batches. The
split depends on the request's data only, never on load: the same request on the same weights gives
the same gradient bits, so a ledger can be verified by running it again.

Doesn't own loss settings (losses.py) or the model (engine.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from everburn.emulator.errors import ContextExceeded, InvalidInput, NonFinite
from everburn.emulator.training.losses import Loss

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

MICRO_BATCH_TOKENS = 1024
"""Padded tokens of one micro-batch: small enough that sampling waits tens of milliseconds, large
enough to hide the Python overhead of a forward pass.
"""


@dataclass(frozen=True, slots=True)
class Example:
    """One checked datum. All arrays have the length of `tokens`."""

    tokens: IntArray
    targets: IntArray
    weights: FloatArray
    """Advantages for a policy loss, weights for cross_entropy."""
    recorded: FloatArray
    """Log-probabilities at sampling time; zeros for cross_entropy."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One checked `forward` or `forward_backward` request."""

    loss: Loss
    examples: Sequence[Example]

    @property
    def tokens(self) -> int:
        return sum(len(example.tokens) for example in self.examples)

    def micro_batches(self) -> "Iterator[MicroBatch]":
        """Batches of consecutive examples: at most MICRO_BATCH_TOKENS padded, or one example."""
        rows: list[Example] = []
        width = 0
        for example in self.examples:
            grown = max(width, len(example.tokens))
            if rows and grown * (len(rows) + 1) > MICRO_BATCH_TOKENS:
                yield MicroBatch.pad(rows, width)
                rows, grown = [], len(example.tokens)
            rows.append(example)
            width = grown
        if rows:
            yield MicroBatch.pad(rows, width)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Examples padded on the right with zeros; every tensor is [rows, width].

    Needs no attention mask: attention is causal, and the weights of the padding are zero.
    """

    lengths: Sequence[int]
    tokens: Tensor
    targets: Tensor
    weights: Tensor
    recorded: Tensor

    @classmethod
    def pad(cls, examples: Sequence[Example], width: int) -> "MicroBatch":
        shape = (len(examples), width)
        tokens, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        weights, recorded = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for row, example in enumerate(examples):
            length = len(example.tokens)
            tokens[row, :length] = example.tokens
            targets[row, :length] = example.targets
            weights[row, :length] = example.weights
            recorded[row, :length] = example.recorded
        return cls(
            lengths=[len(example.tokens) for example in examples],
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            weights=torch.from_numpy(weights),
            recorded=torch.from_numpy(recorded),
        )


def parse_submission(payload: Mapping[str, Any], *, vocabulary: int, positions: int) -> Submission:
    """Parse the `forward_input` or `forward_backward_input` of a request.

    `vocabulary` and `positions` are the base model's limits. Raises InvalidInput, NonFinite or
    ContextExceeded; the message names the datum and the field.
    """
    loss = Loss.parse(payload.get("loss_fn", ""), payload.get("loss_fn_config"))
    data = payload.get("data")
    if not isinstance(data, list) or not data:
        raise InvalidInput("data must be a list of at least one datum")
    reader = _Reader(loss, vocabulary, positions)
    return Submission(loss, [reader.read(index, datum) for index, datum in enumerate(data)])


class _Reader:
    def __init__(self, loss: Loss, vocabulary: int, positions: int) -> None:
        self._loss = loss
        self._vocabulary = vocabulary
        self._positions = positions
        weights = "advantages" if loss.is_policy else "weights"
        self._weights = weights
        self._fields = {"target_tokens", weights} | ({"logprobs"} if loss.is_policy else set())

    def read(self, index: int, datum: Mapping[str, Any]) -> Example:
        where = f"data[{index}]"
        tokens = self._ids(where, "model_input", _model_input(where, datum))
        if len(tokens) == 0:
            raise InvalidInput(f"{where}.model_input holds no token")
        if len(tokens) > self._positions:
            raise ContextExceeded(
                f"{where}.model_input has {len(tokens)} tokens, but the base model has "
                f"{self._positions} positions"
            )
        inputs = datum.get("loss_fn_inputs") or {}
        if unknown := sorted(set(inputs) - self._fields):
            raise InvalidInput(
                f"{where}.loss_fn_inputs has {', '.join(unknown)}, which {self._loss.name} does "
                f"not take; it takes {', '.join(sorted(self._fields))}"
            )
        targets = self._ids(where, "target_tokens", self._values(where, inputs, "target_tokens"))
        weights = self._weights_of(where, inputs, len(tokens))
        recorded = (
            self._floats(where, inputs, "logprobs")
            if self._loss.is_policy
            else np.zeros(len(tokens), np.float32)
        )
        fields: dict[str, IntArray | FloatArray] = {
            "target_tokens": targets,
            self._weights: weights,
            "logprobs": recorded,
        }
        for name, values in fields.items():
            if len(values) != len(tokens):
                raise InvalidInput(
                    f"{where}.{name} has {len(values)} values, but model_input has {len(tokens)} "
                    "tokens"
                )
        return Example(tokens, targets, weights, recorded)

    def _weights_of(self, where: str, inputs: Mapping[str, Any], length: int) -> FloatArray:
        if not self._loss.is_policy and "weights" not in inputs:
            return np.ones(length, np.float32)
        return self._floats(where, inputs, self._weights)

    def _values(self, where: str, inputs: Mapping[str, Any], name: str) -> list[Any]:
        if name not in inputs:
            raise InvalidInput(f"{where}.loss_fn_inputs is missing {name}")
        tensor = inputs[name]
        if tensor.get("sparse_crow_indices") is not None:
            raise InvalidInput(f"{where}.{name} is sparse; the emulator takes one value per token")
        values = tensor.get("data")
        if not isinstance(values, list):
            raise InvalidInput(f"{where}.{name}.data must be a list of numbers")
        shape = tensor.get("shape")
        if shape is not None and shape != [len(values)]:
            raise InvalidInput(
                f"{where}.{name} has shape {shape}; the emulator takes one value per token, "
                f"shape [{len(values)}]"
            )
        return values

    def _ids(self, where: str, name: str, values: list[Any]) -> IntArray:
        ids = np.asarray(values) if values else np.zeros(0, np.int64)
        if ids.dtype.kind != "i":
            raise InvalidInput(f"{where}.{name} must hold integer token ids")
        if len(ids) and (ids.min() < 0 or ids.max() >= self._vocabulary):
            outside = ids[(ids < 0) | (ids >= self._vocabulary)][0]
            raise InvalidInput(
                f"{where}.{name} holds token id {outside}, outside the vocabulary of "
                f"{self._vocabulary}"
            )
        return ids.astype(np.int64, copy=False)

    def _floats(self, where: str, inputs: Mapping[str, Any], name: str) -> FloatArray:
        values = self._values(where, inputs, name)
        try:
            # Clients send NaN as JSON null, which becomes NaN again here.
            with np.errstate(over="ignore"):
                floats = np.asarray(values, np.float32)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{where}.{name} must hold numbers: {error}") from error
        if not np.isfinite(floats).all():
            position = int(np.flatnonzero(~np.isfinite(floats))[0])
            raise NonFinite(f"{where}.{name}[{position}] is not a finite float32 number")
        return floats


def _model_input(where: str, datum: Mapping[str, Any]) -> list[Any]:
    tokens: list[Any] = []
    for chunk in datum.get("model_input", {}).get("chunks", []):
        if chunk.get("type", "encoded_text") != "encoded_text" or "tokens" not in chunk:
            raise InvalidInput(
                f"{where}.model_input has a chunk of type {chunk.get('type')!r}; the emulator "
                "takes encoded_text only"
            )
        tokens.extend(chunk["tokens"])
    return tokens
