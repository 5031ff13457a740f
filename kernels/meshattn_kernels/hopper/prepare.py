# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Small memory-bound kernels around the backward, in plain Triton: its initial rows before, dq in order after."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_rows", "padded_rows", "chunk_rows", "n_q", "num_counters", "scale"],
    do_not_specialize_on_alignment=["lse_ptr", "delta_ptr", "init_ptr", "counters"],
)
def prepare_kernel(
    lse_ptr, delta_ptr, init_ptr, counters, num_rows, padded_rows, chunk_rows, n_q, num_counters, scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What the accumulators of S and dP start at, and counters at zero.

    lse, delta [B * H, chunk_rows]; init [2, num_rows] with num_rows = B * H * padded_rows: -lse / scale, then -delta.
    Rows from n_q on and rows that see no key (lse = -inf) get -inf and 0: whatever is added, p = exp2(-inf) = 0.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = at // padded_rows
    row = at - head * padded_rows
    source = head.to(tl.int64) * chunk_rows + row
    real = (at < num_rows) & (row < n_q)
    lse = tl.load(lse_ptr + source, mask=real, other=float("-inf"))
    seen = lse > float("-inf")
    delta = tl.load(delta_ptr + source, mask=real & seen, other=0.0)
    tl.store(init_ptr + at, tl.where(seen, -lse / scale, float("-inf")), mask=at < num_rows)
    tl.store(init_ptr + num_rows + at, -delta, mask=at < num_rows)
    tl.store(counters + at, 0, mask=at < num_counters)


@triton.jit(do_not_specialize=["chunk_rows", "heads", "scale"])
def finish_dq_kernel(
    acc_ptr, dq_ptr, chunk_rows, heads, scale,
    HEAD_DIM: tl.constexpr, D_TILE: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq [B, C, H, D] = scale * acc [B, H, C, D], whose columns are permuted: see ``column_order``."""
    blocks = tl.cdiv(chunk_rows, ROWS)
    flat_head = tl.program_id(0) // blocks
    row = (tl.program_id(0) - flat_head * blocks) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D_TILE)
    low = (column & 1) | (((column >> 3) & 1) << 1) | (((column >> 1) & 1) << 2)
    if D_TILE == 64 and SEGMENT == 32:
        place = low | (((column >> 4) & 1) << 3) | (((column >> 2) & 1) << 4) | (column >> 5 << 5)
    else:
        place = low | (((column >> 2) & 1) << 3) | (column >> 4 << 4)
    batch = flat_head // heads
    mask = (row < chunk_rows)[:, None] & (column < HEAD_DIM)[None, :]
    first = flat_head.to(tl.int64) * chunk_rows
    value = tl.load(acc_ptr + first * HEAD_DIM + row[:, None] * HEAD_DIM + place[None, :], mask=mask)
    out = (batch.to(tl.int64) * chunk_rows * heads + (flat_head - batch * heads)) * HEAD_DIM
    at = dq_ptr + out + row.to(tl.int64)[:, None] * (heads * HEAD_DIM) + column[None, :]
    tl.store(at, (value * scale).to(dq_ptr.dtype.element_ty), mask=mask)
