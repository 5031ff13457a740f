# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Small memory-bound kernels around the backward, in plain Triton: its initial rows before, dq in order
after."""

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

    lse, delta [B * H, chunk_rows]; init [2, num_rows] with num_rows = B * H * padded_rows: -lse / scale,
    then -delta. Rows from n_q on and rows that see no key (lse = -inf) get -inf and 0: whatever is added, p
    = exp2(-inf) = 0."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = at // padded_rows
    row = at - head * padded_rows
    source = head.to(tl.int64) * chunk_rows + row
    real = (at < num_rows) & (row < n_q)
    lse = tl.load(lse_ptr + source, mask=real, other=float("-inf"))
    seen = lse != float("-inf")  # so that NaN goes on
    delta = tl.load(delta_ptr + source, mask=real & seen, other=0.0)
    tl.store(init_ptr + at, tl.where(seen, -lse / scale, float("-inf")), mask=at < num_rows)
    tl.store(init_ptr + num_rows + at, -delta, mask=at < num_rows)
    tl.store(counters + at, 0, mask=at < num_counters)


@triton.jit(do_not_specialize=["chunk_rows", "heads", "scale"])
def finish_dq_kernel(
    acc_ptr, plus_ptr, dq_ptr, chunk_rows, heads, scale,
    HEAD_DIM: tl.constexpr, D_TILE: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr,
    PLUS: tl.constexpr,
):  # fmt: skip
    """dq [B, C, H, D] = scale * acc [B, H, C, D], whose columns are permuted: see ``column_order``. With PLUS
    acc + plus instead of acc. The last heads first: they may still be in the L2 cache."""
    blocks = tl.cdiv(chunk_rows, ROWS)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    flat_head = number // blocks
    row = (number - flat_head * blocks) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D_TILE)
    mask = (row < chunk_rows)[:, None] & (column < HEAD_DIM)[None, :]
    at = flat_head.to(tl.int64) * chunk_rows * HEAD_DIM + (row[:, None] * HEAD_DIM + column[None, :])
    value = tl.load(acc_ptr + at, mask=mask)
    if PLUS:
        value += tl.load(plus_ptr + at, mask=mask).to(tl.float32)
    value = (value * scale).to(dq_ptr.dtype.element_ty)
    # From the highest bit of the place to the lowest, the bits of the column are ...
    if SEGMENT == 32:  # .. 5 2 4 1 3 0
        value = tl.reshape(value, (ROWS, D_TILE // 32, 2, 2, 2, 2, 2))
        value = tl.permute(value, (0, 1, 3, 5, 2, 4, 6))
    else:  # .. 4 2 1 3 0
        value = tl.permute(tl.reshape(value, (ROWS, D_TILE // 16, 4, 2, 2)), (0, 1, 3, 2, 4))
    value = tl.reshape(value, (ROWS, D_TILE))
    batch = flat_head // heads
    out = dq_ptr + (batch.to(tl.int64) * chunk_rows * heads + (flat_head - batch * heads)) * HEAD_DIM
    tl.store(out + row.to(tl.int64)[:, None] * (heads * HEAD_DIM) + column[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["dk_vectors", "dv_vectors", "scale"])
def finish_dkv_kernel(
    dk_acc, dv_acc, dk_plus_acc, dv_plus_acc, dk_ptr, dv_ptr, dk_vectors, dv_vectors, scale,
    BLOCK: tl.constexpr, PLUS: tl.constexpr,
):  # fmt: skip
    """dk = scale * dk_acc, dv = dv_acc, flat; with PLUS of the sums with dk_plus_acc and dv_plus_acc.

    Sizes come in vectors of 16, so that masks are known to be those of whole vectors."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_dk, in_dv = at < dk_vectors.to(tl.int64) * 16, at < dv_vectors.to(tl.int64) * 16
    dk = tl.load(dk_acc + at, mask=in_dk)
    dv = tl.load(dv_acc + at, mask=in_dv)
    if PLUS:
        dk += tl.load(dk_plus_acc + at, mask=in_dk).to(tl.float32)
        dv += tl.load(dv_plus_acc + at, mask=in_dv).to(tl.float32)
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=in_dk)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=in_dv)


@triton.jit(
    do_not_specialize=["kv_heads", "all_kv_heads", "num_keys", "num_tiles", "first_tile", "scale"],
    do_not_specialize_on_alignment=["num_parts"],
)
def add_parts_kernel(
    dk_parts, dv_parts, dk_ptr, dv_ptr, num_parts, kv_heads, all_kv_heads, num_keys, num_tiles, first_tile,
    scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, D_TILE: tl.constexpr, DV_TILE: tl.constexpr,
    KV_TILE: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """dk, dv [B, C_k, H_kv, D or D_v] = or += the parts of their tiles, in the order of turns; dk is scaled
    if it is no accumulator but the result in the type of the inputs.

    Parts are [turns, B * H_kv, num_tiles, KV_TILE, D or D_v], of tiles from first_tile on; num_parts
    [num_tiles] says how many a tile has, 0 if its only task has stored it already."""
    PIECES: tl.constexpr = KV_TILE // ROWS
    piece = tl.program_id(0) % PIECES
    tile = tl.program_id(0) // PIECES % num_tiles
    kv_head = tl.program_id(0) // PIECES // num_tiles
    parts = tl.load(num_parts + tile)
    if parts > 0:
        batch = kv_head // kv_heads
        key = (first_tile + tile) * KV_TILE + piece * ROWS + tl.arange(0, ROWS)
        row = (batch.to(tl.int64) * num_keys + key) * kv_heads + (kv_head - batch * kv_heads)
        first = (kv_head.to(tl.int64) * num_tiles + tile) * KV_TILE + piece * ROWS + tl.arange(0, ROWS)
        stride = all_kv_heads.to(tl.int64) * num_tiles * KV_TILE
        real = key < num_keys
        dv_at, dv_mask, dv = sum_of_parts(
            dv_parts, dv_ptr, first, stride, row, real, parts, HEAD_DIM_V, DV_TILE, FIRST
        )
        dk_at, dk_mask, dk = sum_of_parts(
            dk_parts, dk_ptr, first, stride, row, real, parts, HEAD_DIM, D_TILE, FIRST
        )
        if dk_ptr.dtype.element_ty != tl.float32:
            dk *= scale
        tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), mask=dv_mask)
        tl.store(dk_at, dk.to(dk_ptr.dtype.element_ty), mask=dk_mask)


LOADS_AHEAD = tl.constexpr(8)
"""Parts on their way at a time: a short sum takes the time of one read, not one a part."""


@triton.jit
def sum_of_parts(
    parts_ptr, acc_ptr, first, stride, row, real, parts,
    DIM: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Addresses, mask and sum of some rows: ``first`` of the first part, ``stride`` rows from part to part,
    ``row`` of the accumulator."""
    column = tl.arange(0, TILE)
    mask = real[:, None] & (column < DIM)[None, :]
    at = acc_ptr + row[:, None] * DIM + column[None, :]
    source = parts_ptr + first[:, None] * DIM + column[None, :]
    total = tl.zeros(mask.shape, tl.float32)
    if not FIRST:
        total = tl.load(at, mask=mask)
    for begin in range(0, parts, LOADS_AHEAD):
        for i in tl.static_range(LOADS_AHEAD):
            total += tl.load(source, mask=mask & (begin + i < parts), other=0.0)
            source += stride * DIM
    return at, mask, total
