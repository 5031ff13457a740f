"""Launching with little host time.

An ordinary Triton launch inspects and specialises every argument, and these kernels have thirty to forty of
them. Here only constants and types make a variant: no number is specialised, and all pointers are multiples
of 16. Where they are not, or a number needs more than 32 bits, the launch is an ordinary one, as it is in the
interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from meshattn_kernels.bound import FUSED
from meshattn_kernels.portable.launch import INTERPRETED

_MAX_INT = 2**31 - 1


class Launcher:
    """A jitted kernel whose arguments are pointers, numbers (all of ``do_not_specialize``) and constants, in
    this order; with its compiled variants."""

    def __init__(self, function: Any, *, cooperative: bool = False) -> None:
        self._function = function
        self._options = FUSED | ({"launch_cooperative_grid": True} if cooperative else {})
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        numbers: Sequence[float],
        constants: tuple[int | bool, ...],
        *,
        warps: int,
    ) -> None:
        """Launch on the current stream of the current device, which holds the tensors."""
        pointers = [x.data_ptr() for x in tensors]
        aligned = not any(x % 16 for x in pointers)
        if INTERPRETED or not aligned or max(numbers) > _MAX_INT:
            args = (*tensors, *numbers, *constants)
            self._function[grid](*args, num_warps=warps, **self._options)
            return
        key = (tensors[0].device.index, warps, constants, *[x.dtype for x in tensors], *map(type, numbers))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._function.warmup(
                *tensors, *numbers, *constants, grid=grid, num_warps=warps, **self._options
            )
            self._compiled[key] = compiled
        compiled[grid](*pointers, *numbers, *constants)
