# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Puts together what several tasks of the forward have computed of the same rows, from some keys each."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_rows", "n_q", "heads"], do_not_specialize_on_alignment=["lse_ptr", "joins"]
)
def join_parts_kernel(
    out_parts, lse_parts, joins, out_ptr, lse_ptr, num_rows, n_q, heads,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM_V: tl.constexpr, DV_TILE: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """out [B, num_rows, H, D_v] and lse [B, H, num_rows] of some blocks of rows, as the mean of their parts,
    weighted by exp(lse); not FIRST: and of what is there.

    out_parts [parts, BLOCK, D_v], lse_parts [parts, BLOCK]. joins [blocks, 8]: batch, head, number of the
    block in its sequence, first part, number of parts, 0, 0, 0."""
    PIECES: tl.constexpr = BLOCK // ROWS
    entry = joins + tl.program_id(0) // PIECES * 8
    inside = tl.program_id(0) % PIECES * ROWS + tl.arange(0, ROWS)
    batch, head, block = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    first, count = tl.load(entry + 3), tl.load(entry + 4)
    row = block * BLOCK + inside
    column = tl.arange(0, DV_TILE)
    real = row < (num_rows if FIRST else n_q)
    mask = real[:, None] & (column < HEAD_DIM_V)[None, :]
    lse_at = lse_ptr + (batch * heads + head).to(tl.int64) * num_rows + row
    out_at = out_ptr + ((batch.to(tl.int64) * num_rows + row) * heads + head)[:, None] * HEAD_DIM_V + column
    old = tl.full((ROWS,), float("-inf"), tl.float32)
    if not FIRST:
        old = tl.load(lse_at, mask=real, other=float("-inf"))
    greatest = old
    for part in range(first, first + count):
        greatest = tl.maximum(greatest, tl.load(lse_parts + part * BLOCK + inside))
    greatest = tl.where(greatest > float("-inf"), greatest, 0.0)  # rows that see no key: all weights are 0
    total = tl.exp(old - greatest)
    out = tl.zeros((ROWS, DV_TILE), tl.float32)
    if not FIRST:
        out = total[:, None] * tl.load(out_at, mask=mask, other=0.0)
    for part in range(first, first + count):
        at = part * BLOCK + inside
        weight = tl.exp(tl.load(lse_parts + at) - greatest)
        total += weight
        out += weight[:, None] * tl.load(out_parts + at[:, None] * HEAD_DIM_V + column, mask=mask, other=0.0)
    scale = tl.where(total != 0.0, 1.0 / total, 0.0)  # NaN is not 0
    tl.store(lse_at, tl.where(total != 0.0, greatest + tl.log(total), float("-inf")), mask=real)
    tl.store(out_at, (out * scale[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
