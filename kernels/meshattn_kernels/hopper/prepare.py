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


@triton.jit(do_not_specialize=["dk_vectors", "dv_vectors", "scale"])
def finish_dkv_kernel(dk_acc, dv_acc, dk_ptr, dv_ptr, dk_vectors, dv_vectors, scale, BLOCK: tl.constexpr):
    """dk = scale * dk_acc, dv = dv_acc, flat. Sizes come in vectors of 16, so that masks are known to be
    those of whole vectors."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_dk, in_dv = at < dk_vectors.to(tl.int64) * 16, at < dv_vectors.to(tl.int64) * 16
    dk = tl.load(dk_acc + at, mask=in_dk)
    dv = tl.load(dv_acc + at, mask=in_dv)
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=in_dk)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=in_dv)


@triton.jit(
    do_not_specialize=["kv_heads", "all_kv_heads", "num_keys", "num_tiles"],
    do_not_specialize_on_alignment=["num_parts"],
)
def add_parts_kernel(
    dk_parts, dv_parts, dk_acc, dv_acc, num_parts, kv_heads, all_kv_heads, num_keys, num_tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, D_TILE: tl.constexpr, DV_TILE: tl.constexpr,
    KV_TILE: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """dk, dv [B, C_k, H_kv, D or D_v] = or += the parts of their tiles, in the order of turns.

    Parts are [turns, B * H_kv, num_tiles, KV_TILE, D or D_v]; num_parts [num_tiles] says how many a tile
    has, 0 if its only task has stored it already."""
    PIECES: tl.constexpr = KV_TILE // ROWS
    piece = tl.program_id(0) % PIECES
    tile = tl.program_id(0) // PIECES % num_tiles
    kv_head = tl.program_id(0) // PIECES // num_tiles
    parts = tl.load(num_parts + tile)
    if parts > 0:
        batch = kv_head // kv_heads
        row = piece * ROWS + tl.arange(0, ROWS)
        corner = (batch.to(tl.int64) * num_keys + tile * KV_TILE) * kv_heads + (kv_head - batch * kv_heads)
        real = tile * KV_TILE + row < num_keys
        first = (kv_head.to(tl.int64) * num_tiles + tile) * KV_TILE
        step = all_kv_heads.to(tl.int64) * num_tiles * KV_TILE
        add_parts(
            dk_parts,
            dk_acc + corner * HEAD_DIM,
            first,
            step,
            row,
            real,
            parts,
            kv_heads,
            HEAD_DIM,
            D_TILE,
            FIRST,
        )
        add_parts(
            dv_parts,
            dv_acc + corner * HEAD_DIM_V,
            first,
            step,
            row,
            real,
            parts,
            kv_heads,
            HEAD_DIM_V,
            DV_TILE,
            FIRST,
        )


@triton.jit
def add_parts(
    parts_ptr, acc_ptr, first, step, row, real, parts, kv_heads,
    DIM: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One piece of a tile: ``first`` and ``step`` are rows of ``parts_ptr``, ``row`` those within the
    tile."""
    column = tl.arange(0, TILE)
    mask = real[:, None] & (column < DIM)[None, :]
    at = acc_ptr + row[:, None] * (kv_heads * DIM) + column[None, :]
    source = parts_ptr + (first + row)[:, None] * DIM + column[None, :]
    total = tl.load(source, mask=mask)
    if not FIRST:
        total = tl.load(at, mask=mask) + total
    for _part in range(1, parts):
        source += step * DIM
        total += tl.load(source, mask=mask)
    tl.store(at, total, mask=mask)
