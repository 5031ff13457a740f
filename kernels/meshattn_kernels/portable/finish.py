# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Flat passes over accumulators: scale and cast, and the sum of parts in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["size", "scale"])
def scale_and_cast_kernel(acc_ptr, result_ptr, size, scale, BLOCK: tl.constexpr):
    """result = acc * scale, in the type of result."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < size
    acc = tl.load(acc_ptr + offset, mask=mask)
    tl.store(result_ptr + offset, (acc * scale).to(result_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["size", "parts"])
def add_parts_kernel(parts_ptr, acc_ptr, size, parts, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """acc [size] = or += parts [parts, size], summed from the first part to the last."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < size
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        total += tl.load(parts_ptr + part * size.to(tl.int64) + offset, mask=mask)
    if not FIRST:
        total += tl.load(acc_ptr + offset, mask=mask)
    tl.store(acc_ptr + offset, total, mask=mask)
