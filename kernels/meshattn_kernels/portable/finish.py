# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Flat passes: terms of rows before a backward, the sum of parts in order, and scale and cast at the end.

A program takes BLOCK elements. Only the last may have fewer: the others need no mask and so move 16 bytes at
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshattn_kernels.portable.tiles import term_rows, to_base


@triton.jit(do_not_specialize=["rows", "n_q", "heads"])
def row_terms_kernel(
    lse_ptr,  # fp32 [B, H, C_q], contiguous
    delta_ptr,
    terms_ptr,  # fp32 [B, H, rows of whole tiles, 2], contiguous
    rows,
    n_q,
    heads,
    SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What a backward subtracts in a row: its exponent, lse in the base of ``tiles.power``, and delta.

    A row that saw no key (lse -inf) has exponent +inf, so that its p is 0, and padding has too.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(2).to(tl.int64) * heads + tl.program_id(1)
    lse = tl.load(lse_ptr + head * rows + row, mask=row < n_q, other=float("-inf"))
    delta = tl.load(delta_ptr + head * rows + row, mask=row < n_q, other=0.0)
    exponent = tl.where(lse == float("-inf"), float("inf"), to_base(lse, SINGLE))
    terms = terms_ptr + head * term_rows(rows) * 2 + 2 * row[:, None] + tl.arange(0, 2)[None, :]
    tl.store(terms, tl.join(exponent, delta))


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


@triton.jit(do_not_specialize=["size", "parts", "factor"])
def add_parts_kernel(parts_ptr, acc_ptr, size, parts, factor, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """acc [size] = or += factor * parts [parts, size], summed from the first part to the last."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < size
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        total += tl.load(parts_ptr + part * size.to(tl.int64) + offset, mask=mask)
    total *= factor
    if not FIRST:
        total += tl.load(acc_ptr + offset, mask=mask)
    tl.store(acc_ptr + offset, total, mask=mask)
