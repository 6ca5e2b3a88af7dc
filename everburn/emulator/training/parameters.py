"""The trainable parameters of a module in one flat buffer.

Accumulating, clipping, stepping and checking for finiteness are then single tensor operations,
whatever the number of layers. Does not own what is done with the buffer.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from everburn.emulator.models.bases import Tensors

ALIGNMENT = 16
"""Floats between possible starts of a parameter in the flat buffer: 64 bytes, so that every
parameter is aligned as a tensor of its own would be. Kernels may round differently on other
alignments.
"""


class FlatParameters:
    """The trainable parameters of a module, moved into one buffer that they become views of."""

    def __init__(self, module: nn.Module) -> None:
        trainable = {
            name.replace(".default.", "."): parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._places: dict[str, tuple[int, torch.Size]] = {}
        size = 0
        for name, parameter in trainable.items():
            self._places[name] = (size, parameter.shape)
            size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.values = torch.zeros(size)
        self.gradient = torch.zeros(size)
        self.parameter = nn.Parameter(self.values)
        """The same storage as `values`, as the optimizer takes it."""
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
        for name, (start, shape) in self._places.items():
            yield name, buffer[start : start + shape.numel()].view(shape)
