"""What a launch needs beside tensors: tile sizes from a static table, checked inputs, row bounds on the
device.

Tile sizes decide the order of sums and so bits: they follow from head size, type and GPU generation alone,
and nothing is tuned at run time.
"""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from meshattn_kernels import device as gpu
from meshattn_kernels.intervals import ArrayIntervals, BandIntervals, Intervals
from meshattn_kernels.keeping import keep
from meshattn_kernels.rules import MAX_HEAD_DIM, Capability

Pass = Literal["forward", "dkdv", "dq", "dash"]
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter: decided by TRITON_INTERPRET=1 before triton is first
imported."""

_MAX_STRIDE = 2**31 // MAX_HEAD_DIM
_interpreter_lock = threading.Lock()


@dataclass(frozen=True)
class Tiling:
    """Tile sizes of one kernel and how the compiler is to build it.

    held    keep in registers what a program multiplies everything with (q, or k): Hopper's products then read
            half as much shared memory, which limits them, and there is room for a stage more.
    """

    q_tile: int
    kv_tile: int
    stages: int
    warps: int
    held: bool = False


# sm_100 and sm_90 have asynchronous products and 227 KiB of shared memory for a thread block, sm_80 has 163
# KiB; "small" are sm_86, 89 and 120 with 99 KiB.
_Family = Literal["sm100", "sm90", "sm80", "small"]

# By family and greatest padded head size, for 16-bit inputs: no kernel spills more than 64 bytes (see the
# tests).
_HALF: dict[Pass, dict[tuple[_Family, int], Tiling]] = {
    "forward": {
        ("sm100", 64): Tiling(128, 64, stages=3, warps=8),
        ("sm100", 128): Tiling(128, 64, stages=2, warps=8),
        ("sm100", 256): Tiling(64, 64, stages=2, warps=8),
        ("sm90", 64): Tiling(64, 64, stages=3, warps=4),
        ("sm90", 128): Tiling(64, 64, stages=3, warps=4, held=True),
        ("sm90", 256): Tiling(128, 64, stages=2, warps=8),
        ("sm80", 64): Tiling(128, 64, stages=3, warps=4),
        ("sm80", 128): Tiling(128, 32, stages=4, warps=8),
        ("sm80", 256): Tiling(64, 64, stages=2, warps=8),
        ("small", 64): Tiling(128, 64, stages=3, warps=4),
        ("small", 128): Tiling(128, 32, stages=3, warps=8),
        ("small", 256): Tiling(64, 32, stages=2, warps=8),
    },
    "dkdv": {
        ("sm100", 64): Tiling(64, 128, stages=2, warps=8),
        ("sm100", 128): Tiling(64, 128, stages=2, warps=8),
        ("sm100", 256): Tiling(32, 64, stages=2, warps=8),
        ("sm90", 64): Tiling(64, 64, stages=3, warps=4, held=True),
        ("sm90", 128): Tiling(64, 64, stages=3, warps=4, held=True),
        ("sm90", 256): Tiling(64, 32, stages=2, warps=4),
        ("sm80", 64): Tiling(32, 128, stages=3, warps=8),
        ("sm80", 128): Tiling(64, 64, stages=3, warps=8),
        ("sm80", 256): Tiling(32, 32, stages=3, warps=4),
        ("small", 64): Tiling(32, 128, stages=3, warps=8),
        ("small", 128): Tiling(64, 64, stages=2, warps=8),
        ("small", 256): Tiling(32, 32, stages=2, warps=4),
    },
    "dq": {
        ("sm100", 64): Tiling(128, 64, stages=3, warps=8),
        ("sm100", 128): Tiling(128, 64, stages=3, warps=8),
        ("sm100", 256): Tiling(64, 32, stages=2, warps=8),
        ("sm90", 64): Tiling(128, 64, stages=3, warps=4),
        ("sm90", 128): Tiling(64, 64, stages=3, warps=4, held=True),
        ("sm90", 256): Tiling(64, 32, stages=3, warps=4),
        ("sm80", 64): Tiling(128, 64, stages=3, warps=8),
        ("sm80", 128): Tiling(64, 64, stages=3, warps=4),
        ("sm80", 256): Tiling(64, 32, stages=3, warps=8),
        ("small", 64): Tiling(64, 64, stages=3, warps=4),
        ("small", 128): Tiling(64, 32, stages=3, warps=4),
        ("small", 256): Tiling(32, 32, stages=2, warps=4),
    },
    "dash": {
        ("sm100", 64): Tiling(64, 64, stages=3, warps=8),
        ("sm100", 128): Tiling(64, 32, stages=3, warps=8),
        ("sm100", 256): Tiling(32, 32, stages=3, warps=8),
        ("sm90", 64): Tiling(64, 128, stages=3, warps=8),
        ("sm90", 128): Tiling(64, 64, stages=3, warps=8),
        ("sm90", 256): Tiling(32, 32, stages=3, warps=8),
        ("sm80", 64): Tiling(32, 64, stages=3, warps=8),
        ("sm80", 128): Tiling(32, 32, stages=3, warps=8),
        ("sm80", 256): Tiling(16, 32, stages=3, warps=8),
        ("small", 64): Tiling(32, 128, stages=3, warps=8),
        ("small", 128): Tiling(64, 32, stages=2, warps=8),
        ("small", 256): Tiling(32, 32, stages=2, warps=8),
    },
}
# float32 products run without tensor cores, so that they are as exact as eager attention in float32.
_SINGLE: dict[Pass, dict[int, Tiling]] = {
    "forward": {
        64: Tiling(32, 32, stages=2, warps=4),
        128: Tiling(32, 16, stages=2, warps=8),
        256: Tiling(32, 16, stages=2, warps=8),
    },
    "dkdv": {
        64: Tiling(32, 32, stages=2, warps=8),
        128: Tiling(16, 32, stages=2, warps=8),
        256: Tiling(16, 32, stages=2, warps=8),
    },
    "dq": {
        64: Tiling(32, 64, stages=2, warps=8),
        128: Tiling(32, 32, stages=2, warps=8),
        256: Tiling(16, 32, stages=2, warps=8),
    },
    "dash": {
        64: Tiling(32, 32, stages=1, warps=8),
        128: Tiling(16, 32, stages=2, warps=8),
        256: Tiling(16, 16, stages=2, warps=8),
    },
}
# From sm_100 on the compiler takes all registers for these, and 700 bytes more, with the tiles above.
_SINGLE_FROM_SM100: dict[tuple[Pass, int], Tiling] = {("dq", 128): Tiling(32, 16, stages=2, warps=8)}
# Dropout's words of rows would leave no room for two thread blocks on a multiprocessor.
_DROPOUT: dict[tuple[Pass, _Family, int], Tiling] = {
    ("dkdv", "sm90", 128): Tiling(64, 64, stages=2, warps=4),
}
_INTERPRETER: dict[Pass, Tiling] = {
    "forward": Tiling(32, 16, stages=1, warps=1, held=True),
    "dkdv": Tiling(32, 16, stages=1, warps=1, held=True),
    "dq": Tiling(16, 32, stages=1, warps=1, held=True),
    "dash": Tiling(32, 16, stages=1, warps=1),
}


def tiling(
    which: Pass,
    widths: tuple[int, int],
    dtype: torch.dtype,
    capability: Capability | None,
    dropout: bool = False,
) -> Tiling:
    """Tile sizes for the ``padded_dims`` of a call; ``capability`` None is the interpreter."""
    if capability is None:
        return _INTERPRETER[which]
    bucket = max(64, *widths)
    if dtype == torch.float32:
        tiles = _SINGLE[which][bucket]
        return _SINGLE_FROM_SM100.get((which, bucket), tiles) if capability >= (10, 0) else tiles
    by_major: dict[int, _Family] = {9: "sm90", 10: "sm100"}
    family = "sm80" if capability == (8, 0) else by_major.get(capability[0], "small")
    tiles = _HALF[which][family, bucket]
    if dropout:
        tiles = _DROPOUT.get((which, family, bucket), tiles)
    # Where k is held and a tile is narrow, ptxas 12.8 takes a wrong half of its address: dk lacked rows.
    return tiles if min(widths) >= 64 else replace(tiles, held=False)


def tiles_for(which: Pass, q: Tensor, v: Tensor, dropout: bool) -> Tiling:
    """Tile sizes for a call."""
    capability = capability_of(q.device)
    widths = padded_dims(q.shape[-1], v.shape[-1], capability)
    return tiling(which, widths, q.dtype, capability, dropout)


def strides(*tensors: Tensor) -> tuple[int, list[int]]:
    """A unit, and the strides of batch and head of each in it.

    The unit is 8 elements where that divides them, as it does head sizes: 16 bytes, which one instruction
    then loads.
    """
    elements = [stride for x in tensors for stride in (x.stride(0), x.stride(2))]
    unit = math.gcd(8, *elements)
    return unit, [stride // unit for stride in elements]


def constants(tiles: Tiling, q: Tensor, k: Tensor, v: Tensor, *do: Tensor) -> tuple[int | bool, ...]:
    """The compile-time arguments that all kernels have behind STRIDE_UNIT: strides of rows, D, D_V, PADDED_D,
    PADDED_D_V, Q_TILE, KV_TILE, STAGES, SINGLE, HOIST.

    The strides of rows follow from the layout of a model, not from a sequence, so that they cost few
    compilations; as constants they save registers and address arithmetic in every step.
    """
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    capability = capability_of(q.device)
    return (
        *(x.stride(1) for x in (q, k, v, *do)),
        head_dim,
        head_dim_v,
        *padded_dims(head_dim, head_dim_v, capability),
        tiles.q_tile,
        tiles.kv_tile,
        tiles.stages,
        q.dtype == torch.float32,
        hoists(q.dtype, capability),
    )


def padded_dims(head_dim: int, head_dim_v: int, capability: Capability | None) -> tuple[int, int]:
    """Widths of the tiles of q, k and of v: powers of two, at least the 16 of a tensor-core product.

    On Hopper both are 64 at least, or the same, so that all tiles lie in shared memory in one pattern: of
    kernels with two, ptxas 12.8 has made some that read an address of a product before it is set.
    """
    width, width_v = (max(16, 1 << (dim - 1).bit_length()) for dim in (head_dim, head_dim_v))
    if capability is not None and capability[0] == 9:
        least = min(64, max(width, width_v))
        width, width_v = max(width, least), max(width_v, least)
    return width, width_v


def hoists(dtype: torch.dtype, capability: Capability | None) -> bool:
    """Whether the compiler is to move out of loops what does not change in them.

    It takes registers. But where products read registers alone, triton 3.9 would otherwise write q, or k and
    v, to shared memory anew in every step; those of 16-bit numbers of sm_90 and sm_100 read what lies there.
    """
    return dtype == torch.float32 or capability is None or capability[0] not in (9, 10)


@cache
def _device_capability(index: int) -> Capability:
    return torch.cuda.get_device_capability(index)


def num_workers(device: torch.device) -> int:
    """Thread blocks that are resident at once, one a multiprocessor; the interpreter runs one after the
    other."""
    return 1 if INTERPRETED else gpu.multiprocessors(device)


def capability_of(device: torch.device) -> Capability | None:
    """Compute capability of a GPU, None where kernels are interpreted."""
    return None if INTERPRETED else _device_capability(device.index)


def readable(x: Tensor) -> Tensor:
    """x, or a copy of it where its last dim is not contiguous or a stride would overflow 32 bits in a
    tile."""
    return x if x.stride(-1) == 1 and x.stride(1) < _MAX_STRIDE else x.contiguous()


_Bounds = tuple[list[Tensor], gpu.Ready | None]
_bounds_on_device: WeakKeyDictionary[ArrayIntervals, dict[torch.device, _Bounds]] = WeakKeyDictionary()


@dataclass(frozen=True)
class RowBounds:
    """The intervals as kernel arguments: two arrays or two integers, the others unused."""

    band: bool
    start: Tensor
    end: Tensor
    band_of: tuple[int, int]


def row_bounds(intervals: Intervals, unused: Tensor) -> RowBounds:
    """Arrays are copied to the device of ``unused`` (any tensor, never read) once."""
    if isinstance(intervals, BandIntervals):
        edges = max(intervals.lo, -intervals.n_k), min(intervals.hi, intervals.n_q)
        return RowBounds(True, unused, unused, edges)
    device = unused.device
    if intervals.start.device == device:
        return RowBounds(False, intervals.start, intervals.end, (0, 0))
    copies = _bounds_on_device.setdefault(intervals, {})
    if device not in copies:
        copies[device] = gpu.copied(device, intervals.start, intervals.end), gpu.ready_on(device)
    bounds, ready = copies[device]
    with on_device(device):
        keep(bounds, ready)
    start, end = bounds
    return RowBounds(False, start, end, (0, 0))


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launches inside go to this device; interpreted ones, which share global state, run one at a time."""
    return _interpreter_lock if INTERPRETED else gpu.on_device(device)
