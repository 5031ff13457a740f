# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Everything the Hopper kernels need from Gluon that is private, missing or renamed between Triton versions.

Gluon (triton.experimental.gluon) is part of Triton but not a stable interface. All other modules of this
package use only what is public and equal in the versions that ``meshattn_kernels.rules`` admits.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

__all__ = [
    "LN2",
    "LOG2E",
    "aggregate",
    "load_tile",
    "new_barriers",
    "reinterpret",
    "store_tile",
    "tma_reduce_add",
]

if hasattr(tma, "async_load"):  # from 3.9 on
    load_tile, store_tile = tma.async_load, tma.async_store
else:
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global


@builtin
def tma_reduce_add(desc, coord, source, _semantic=None):
    """Asynchronous global[coord] += source, a tile in shared memory."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, source.handle
    )


@builtin
def reinterpret(memory, shape, layout, _semantic=None):
    """The same shared memory with another shape and layout."""
    renamed = getattr(memory, "reinterpret", None) or memory._reinterpret
    return renamed(memory.dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers [COUNT, 1]; a phase of each ends after ARRIVALS arrivals (and the expected bytes)."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers
