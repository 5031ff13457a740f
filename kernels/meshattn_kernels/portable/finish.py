# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Flat passes: exponents before a backward, the sum of parts in a fixed order, and scale and cast at the end.

A program takes BLOCK elements. Only the last may have fewer: the others need no mask and so move 16 bytes at
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshattn_kernels.portable.tiles import to_base


@triton.jit(do_not_specialize=["size"])
def exponents_kernel(lse_ptr, exponent_ptr, size, SINGLE: tl.constexpr, BLOCK: tl.constexpr):
    """lse in the base of ``tiles.power``; +inf for a row that saw no key (lse -inf), so that its p is 0."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lse = tl.load(lse_ptr + offset, mask=offset < size, other=0.0)
    exponent = tl.where(lse == float("-inf"), float("inf"), to_base(lse, SINGLE))
    tl.store(exponent_ptr + offset, exponent, mask=offset < size)


@triton.jit(do_not_specialize=["size", "scale"])
def scale_and_cast_kernel(acc_ptr, result_ptr, size, scale, BLOCK: tl.constexpr):
    """result = acc * scale, in the type of result."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    acc_ptr += begin
    result_ptr += begin
    offset = tl.arange(0, BLOCK)
    if begin + BLOCK <= size:
        tl.store(result_ptr + offset, (tl.load(acc_ptr + offset) * scale).to(result_ptr.dtype.element_ty))
    else:
        mask = begin + offset < size
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
