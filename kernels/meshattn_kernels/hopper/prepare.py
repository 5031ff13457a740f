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
    mask = (row < chunk_rows)[:, None] & (column < HEAD_DIM)[None, :]
    tile = acc_ptr + flat_head.to(tl.int64) * chunk_rows * HEAD_DIM
    value = tl.load(tile + row[:, None] * HEAD_DIM + column[None, :], mask=mask) * scale
    value = value.to(dq_ptr.dtype.element_ty)
    # From the highest bit of the place to the lowest, the bits of the column are ...
    if D_TILE == 64 and SEGMENT == 32:  # 5 2 4 1 3 0
        value = tl.permute(tl.reshape(value, (ROWS, 2, 2, 2, 2, 2, 2)), (0, 1, 3, 5, 2, 4, 6))
    else:  # .. 4 2 1 3 0
        value = tl.permute(tl.reshape(value, (ROWS, D_TILE // 16, 4, 2, 2)), (0, 1, 3, 2, 4))
    value = tl.reshape(value, (ROWS, D_TILE))
    batch = flat_head // heads
    out = dq_ptr + (batch.to(tl.int64) * chunk_rows * heads + (flat_head - batch * heads)) * HEAD_DIM
    tl.store(out + row.to(tl.int64)[:, None] * (heads * HEAD_DIM) + column[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["dk_size", "dv_size", "scale"])
def finish_dkv_kernel(dk_acc, dv_acc, dk_ptr, dv_ptr, dk_size, dv_size, scale, BLOCK: tl.constexpr):
    """dk = scale * dk_acc, dv = dv_acc, flat."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dk = tl.load(dk_acc + at, mask=at < dk_size)
    dv = tl.load(dv_acc + at, mask=at < dv_size)
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=at < dk_size)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=at < dv_size)
