"""Several tensors in one flat buffer, so that one message moves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """One tensor of a packed buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Packing:
    """Tensors laid one after the other without gaps, so that the bytes sent are the bytes of the tensors.

    Every field must begin at a multiple of its element size: matrices whose rows are multiples of 16 bytes
    come first.
    """

    fields: tuple[Field, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self.fields)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The fields as tensors that share the memory of `buffer` (flat uint8)."""
        views: dict[str, Tensor] = {}
        begin = 0
        for field in self.fields:
            assert begin % field.dtype.itemsize == 0, f"{field.name} would not be aligned"
            views[field.name] = buffer[begin : begin + field.nbytes].view(field.dtype).view(field.shape)
            begin += field.nbytes
        return views

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """The fields as tensors of their own, where nothing is to be sent."""
        return {
            field.name: torch.empty(field.shape, dtype=field.dtype, device=device) for field in self.fields
        }

    def write(self, buffer: Tensor, values: Mapping[str, Tensor]) -> None:
        """Copy (and cast) `values` into `buffer`."""
        for name, view in self.views(buffer).items():
            view.copy_(values[name])
