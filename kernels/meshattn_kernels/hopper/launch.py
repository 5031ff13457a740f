"""Launching with little host time: compiled variants, TMA descriptors and whole launches are made once and
kept.

An ordinary Triton launch inspects and specialises every argument and encodes every descriptor anew: about
0.3 ms for a kernel with six of them. Here a variant depends on the constants and the types of the tensors
alone (no integer is specialised, all specialised pointers are multiples of 16), and a launch is a list of
numbers that is kept under the addresses, shapes and strides that it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from meshattn_kernels.bound import FUSED, Launch, bound

_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@dataclass(frozen=True)
class _Address:
    """What a descriptor needs of a tensor. Not the tensor: a kept launch must not keep its memory."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


@lru_cache(maxsize=64)
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_TYPES[dtype])


def descriptor(
    tensor: Tensor, shape: Sequence[int], strides: Sequence[int], block: tuple[int, ...]
) -> TensorDescriptor:
    """A descriptor of blocks of the memory of ``tensor`` seen with this shape and these strides (in
    elements)."""
    address = _Address(tensor.data_ptr(), tensor.dtype)
    return TensorDescriptor(address, list(shape), list(strides), list(block), _layout(block, tensor.dtype))


def tiles_of(x: Tensor, num_rows: int, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor of x [B, S, H, D] as [B, H, S, D] cut off after ``num_rows`` rows: what lies beyond these
    rows or beyond D is read as zero. x must be ``tma_ready``."""
    batch, all_rows, heads, head_dim = x.shape
    sizes, strides = (batch, heads, all_rows), (x.stride(0), x.stride(2), x.stride(1))
    # The stride of a dim of one element means nothing to torch but must be valid here.
    valid = [stride if size > 1 else head_dim for size, stride in zip(sizes, strides, strict=True)]
    return descriptor(x, (batch, heads, num_rows, head_dim), (*valid, 1), (1, 1, rows, columns))


def tma_ready(x: Tensor) -> Tensor:
    """x [B, S, H, D], or a copy if TMA cannot read it: it needs a contiguous last dim, and a base and other
    strides that are multiples of 16 bytes and not 0."""
    sizes, strides, step = x.shape, x.stride(), 16 // x.element_size()
    if strides[3] == 1 and x.data_ptr() % 16 == 0:
        for size, stride in zip(sizes[:3], strides[:3], strict=True):
            if size > 1 and (stride <= 0 or stride % step):
                break
        else:
            return x
    return x.clone(memory_format=torch.contiguous_format)


class Kernel:
    """A jitted kernel, its compiled variants, and launches of these."""

    def __init__(self, function: Any, *, num_warps: int, cooperative: bool = False) -> None:
        self._function = function
        self._options = {"num_warps": num_warps, "launch_cooperative_grid": cooperative, **FUSED}
        self._variants: dict[tuple[Any, ...], Any] = {}

    def bind(
        self, device: int, grid: int, args: Sequence[Any], constants: dict[str, Any], *types: torch.dtype
    ) -> Launch:
        """A function that launches ``grid`` programs on the current stream of ``device``, the current device.

        ``types`` are those of tensors that vary; ``constants`` stand in the order of the signature.
        """
        variant = (device, *types, *constants.values())
        compiled = self._variants.get(variant)
        if compiled is None:
            compiled = self._function.warmup(*args, **constants, **self._options, grid=(grid,))
            self._variants[variant] = compiled
        return bound(compiled, device, grid, args, tuple(constants.values()))
