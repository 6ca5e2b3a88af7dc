"""The trainable parameters of a module in one flat buffer.

Accumulating, clipping, stepping and finiteness checks are then single tensor operations.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from everburn.emulator.models.bases import Tensors

ALIGNMENT = 16
"""Alignment of a parameter in the buffer, in floats: 64 bytes, as for a separate tensor. Kernels
may round differently at other alignments.
"""


class FlatParameters:
    """Moves the trainable parameters of a module into one buffer; they become views of it."""

    def __init__(self, module: nn.Module) -> None:
        trainable = {
            name.replace(".default.", "."): parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._slices: dict[str, tuple[int, torch.Size]] = {}
        size = 0
        for name, parameter in trainable.items():
            self._slices[name] = (size, parameter.shape)
            size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.values = torch.zeros(size)
        self.gradient = torch.zeros(size)
        self.parameter = nn.Parameter(self.values)
        """The storage of `values`, for the optimizer."""
        for name, values in self._views(self.values):
            values.copy_(trainable[name].detach())
            trainable[name].data = values
        for name, gradient in self._views(self.gradient):
            trainable[name].grad = gradient

    def named(self, buffer: Tensor) -> Tensors:
        """Copies of a buffer's parts by parameter name."""
        return {name: part.clone() for name, part in self._views(buffer)}

    def assign(self, buffer: Tensor, tensors: Tensors) -> None:
        for name, part in self._views(buffer):
            part.copy_(tensors[name])

    def _views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, (start, shape) in self._slices.items():
            yield name, buffer[start : start + shape.numel()].view(shape)
