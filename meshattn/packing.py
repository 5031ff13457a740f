"""Several tensors in one flat buffer, so that one message moves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

Views = Mapping[str, Tensor]


@dataclass(frozen=True)
class Field:
    """One tensor of a packed buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Packed:
    """A flat buffer and the tensors that lie in it."""

    flat: Tensor
    views: Views


@dataclass(frozen=True, eq=False)
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

    def within(self, buffer: Tensor) -> Packed:
        """`buffer` (flat uint8) with its views."""
        return Packed(buffer, self.views(buffer))

    def new(self, device: torch.device) -> Packed:
        """A buffer for fields of one type, which is the type of the buffer."""
        dtype, places = self._places
        flat = torch.empty(self.nbytes // dtype.itemsize, dtype=dtype, device=device)
        views = {name: flat.as_strided(shape, strides, begin) for name, shape, strides, begin in places}
        return Packed(flat, views)

    @cached_property
    def _places(self) -> tuple[torch.dtype, tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...]]:
        """The one type of all fields; name, shape, strides and first element of each."""
        (dtype,) = {field.dtype for field in self.fields}
        places, begin = [], 0
        for field in self.fields:
            strides = tuple(prod(field.shape[dim + 1 :]) for dim in range(len(field.shape)))
            places.append((field.name, field.shape, strides, begin))
            begin += prod(field.shape)
        return dtype, tuple(places)

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """The fields as tensors of their own, where nothing is to be sent."""
        return {
            field.name: torch.empty(field.shape, dtype=field.dtype, device=device) for field in self.fields
        }


def as_written(tensor: Tensor) -> Tensor:
    """The tensor as kernels and transports read it, from its memory.

    The memory of a view that PyTorch negates, or conjugates, when it reads it holds other numbers. The result
    of a functional collective, which ``DTensor.to_local`` may give, has none before it is waited for.
    """
    if type(tensor) is not Tensor and hasattr(tensor, "trigger_wait"):
        tensor = tensor.trigger_wait()
    return tensor.resolve_conj().resolve_neg()


def as_bits(tensor: Tensor) -> Tensor:
    """The memory of a tensor as numbers of a type that PyTorch copies and picks everywhere, which it does not
    do with all: float8 and unsigned integers, for example."""
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return tensor.view(plain[tensor.dtype.itemsize])


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, flat uint8."""
    return tensor.detach().view(-1).view(torch.uint8)
