# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Backward in one persistent kernel of five matrix products, whose sums of dq follow a table (DASH).

Every worker does its tasks of a ``ScheduleTable`` in order (see ``meshattn_kernels.dash`` for the format): a
task holds a key/value tile and its dk, dv, walks some query tiles of one head and adds a part of dq to
memory at each, in the turn that the table gives it. The formulas are those of ``backward_step``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshattn_kernels import dash
from meshattn_kernels.portable.backward_step import MASKED_IF_NEEDED, add_to_dkdv
from meshattn_kernels.portable.scores import SCORE_NUMBERS
from meshattn_kernels.portable.tiles import (
    HEAD_STRIDES,
    add_tile,
    head_offset,
    load_tile,
    product,
    term_rows,
    to_base,
)
from meshattn_kernels.portable.turns import begin_turn, end_turn

LOAD, STORE = tl.constexpr(dash.LOAD), tl.constexpr(dash.STORE)
TURN_SHIFT, TILE_MASK = tl.constexpr(dash.TURN_SHIFT), tl.constexpr((1 << dash.TURN_SHIFT) - 1)


@triton.jit(
    do_not_specialize=[
        *("lo", "hi", "n_q", "n_k", "rows", "keys", "heads", "kv_heads", "batch_heads", "query_tiles"),
        *("kv_tiles", "scale", *SCORE_NUMBERS, *HEAD_STRIDES),
    ]
)
def dash_kernel(
    q_ptr,  # [B, C_q, H, D]
    k_ptr,  # [B, C_k, H_kv, D]
    v_ptr,  # [B, C_k, H_kv, D_v]
    do_ptr,  # [B, C_q, H, D_v]
    terms_ptr,  # fp32 [B, H, rows of whole tiles, 2], contiguous
    words_ptr,  # int64 [B, H, C_q], contiguous
    dq_ptr,  # fp32 [B, C_q, H, D], contiguous
    dk_ptr,  # fp32 [B, C_k, H_kv, D], contiguous
    dv_ptr,  # fp32 [B, C_k, H_kv, D_v], contiguous
    start_ptr,
    end_ptr,
    worker_start_ptr,
    tasks_ptr,
    steps_ptr,
    counters_ptr,  # zero: [B * H, query tiles], then [B * H_kv, key/value tiles]
    lo,
    hi,
    n_q,
    n_k,
    rows,
    keys,
    heads,
    kv_heads,
    batch_heads,
    query_tiles,
    kv_tiles,
    scale,
    cap_scale,
    threshold,
    keep_scale,
    k_offset,
    k_step,
    k_split,
    k_jump,
    q_stride_b,
    q_stride_h,
    k_stride_b,
    k_stride_h,
    v_stride_b,
    v_stride_h,
    do_stride_b,
    do_stride_h,
    STRIDE_UNIT: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    DO_STRIDE: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_D_V: tl.constexpr,
    Q_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SINGLE: tl.constexpr,
    HOIST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    BAND: tl.constexpr,
    FIRST_DQ: tl.constexpr,
    FIRST_DKV: tl.constexpr,
    ORDERED: tl.constexpr,
):
    exponent_scale = to_base(scale, SINGLE)
    bounds = start_ptr, end_ptr, lo, hi, n_q, n_k
    dropout = threshold, (k_offset, k_step, k_split, k_jump)
    lane = tl.arange(0, Q_TILE)
    dq_offset = lane[:, None] * (heads * D) + tl.arange(0, PADDED_D)[None, :]
    dk = tl.zeros((KV_TILE, PADDED_D), tl.float32)
    dv = tl.zeros((KV_TILE, PADDED_D_V), tl.float32)
    worker = tl.program_id(0)
    for task in range(tl.load(worker_start_ptr + worker), tl.load(worker_start_ptr + worker + 1)):
        task_ptr = tasks_ptr + task * 8
        batch_head = tl.load(task_ptr)
        batch_kv_head = tl.load(task_ptr + 1)
        kv_tile = tl.load(task_ptr + 2)
        first_step = tl.load(task_ptr + 3)
        num_steps = tl.load(task_ptr + 4)
        flags = tl.load(task_ptr + 5)
        dkv_turn = tl.load(task_ptr + 6)
        batch = tl.cast(batch_head // heads, tl.int64)
        head = tl.cast(batch_head % heads, tl.int64)
        kv_head = tl.cast(batch_kv_head % kv_heads, tl.int64)
        t0 = kv_tile * KV_TILE
        loads = (flags & LOAD) != 0
        dk = tl.where(loads, 0.0, dk)
        dv = tl.where(loads, 0.0, dv)
        # A task without steps may lie beyond the last key: it reads a row that it does not use.
        size = tl.maximum(n_k, 1)
        k_tile_ptr = k_ptr + head_offset(batch, kv_head, k_stride_b, k_stride_h, STRIDE_UNIT)
        v_tile_ptr = v_ptr + head_offset(batch, kv_head, v_stride_b, v_stride_h, STRIDE_UNIT)
        k = load_tile(k_tile_ptr, t0, size, K_STRIDE, KV_TILE, D, PADDED_D)
        v = load_tile(v_tile_ptr, t0, size, V_STRIDE, KV_TILE, D_V, PADDED_D_V)
        q_head_ptr = q_ptr + head_offset(batch, head, q_stride_b, q_stride_h, STRIDE_UNIT)
        do_head_ptr = do_ptr + head_offset(batch, head, do_stride_b, do_stride_h, STRIDE_UNIT)
        terms_head_ptr = terms_ptr + tl.cast(batch_head, tl.int64) * term_rows(rows) * 2
        words_head_ptr = words_ptr + tl.cast(batch_head, tl.int64) * rows
        dq_head_ptr = dq_ptr + (batch * rows * heads + head) * D
        head_counters_ptr = counters_ptr + batch_head * query_tiles

        for step in tl.range(first_step, first_step + num_steps, num_stages=STAGES, disable_licm=not HOIST):
            entry = tl.load(steps_ptr + step)
            query_tile = entry & TILE_MASK
            turn = entry >> TURN_SHIFT
            r0 = query_tile * Q_TILE
            dk, dv, ds = add_to_dkdv(
                dk, dv, k, v, q_head_ptr, do_head_ptr, terms_head_ptr, words_head_ptr, r0, t0, bounds,
                exponent_scale, cap_scale, keep_scale, dropout,
                Q_STRIDE, DO_STRIDE, D, D_V, PADDED_D, PADDED_D_V, Q_TILE, KV_TILE, SINGLE, SOFTCAP, DROPOUT,
                BAND, MASKED_IF_NEEDED,
            )  # fmt: skip
            dq = product(ds.T, k, None, SINGLE)  # [Q_TILE, PADDED_D]

            dq_ptrs = dq_head_ptr + tl.cast(r0, tl.int64) * (heads * D) + dq_offset
            dq_mask = (r0 + lane < rows)[:, None] & (tl.arange(0, PADDED_D) < D)[None, :]
            if ORDERED:
                dq = begin_turn(head_counters_ptr + query_tile, turn, dq)
                # Predicates, no branch: triton 3.6 cannot compile one that uses an asynchronous product.
                if FIRST_DQ:
                    tl.store(dq_ptrs, dq, mask=tl.where(turn == 0, dq_mask, False))
                    tl.atomic_add(dq_ptrs, dq, mask=tl.where(turn > 0, dq_mask, False), sem="relaxed")
                else:
                    tl.atomic_add(dq_ptrs, dq, mask=dq_mask, sem="relaxed")
                end_turn(head_counters_ptr + query_tile, turn)
            else:
                tl.atomic_add(dq_ptrs, dq, mask=dq_mask, sem="relaxed")

        if (flags & STORE) != 0:
            counter_ptr = counters_ptr + batch_heads * query_tiles + batch_kv_head * kv_tiles + kv_tile
            row = batch * keys * kv_heads + kv_head
            ours = dv
            if DROPOUT:
                ours *= keep_scale
            if dkv_turn >= 0:
                ours = begin_turn(counter_ptr, dkv_turn, ours)
            first = FIRST_DKV and dkv_turn <= 0
            add_tile(dk_ptr + row * D, dk, t0, keys, kv_heads * D, first, KV_TILE, D, PADDED_D)
            add_tile(dv_ptr + row * D_V, ours, t0, keys, kv_heads * D_V, first, KV_TILE, D_V, PADDED_D_V)
            if dkv_turn >= 0:
                end_turn(counter_ptr, dkv_turn)


@triton.jit(do_not_specialize=["rows", "width"])
def clear_rows_kernel(tiles_ptr, dq_ptr, rows, width, Q_TILE: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    """Write zero to the query tiles listed: dq_ptr is fp32 [B, rows, width], contiguous."""
    row = tl.load(tiles_ptr + tl.program_id(0)) * Q_TILE + tl.arange(0, Q_TILE)
    dim = tl.program_id(1) * PADDED_WIDTH + tl.arange(0, PADDED_WIDTH)
    ptrs = dq_ptr + (tl.program_id(2).to(tl.int64) * rows + row)[:, None] * width + dim[None, :]
    tl.store(
        ptrs,
        tl.zeros((Q_TILE, PADDED_WIDTH), tl.float32),
        mask=(row < rows)[:, None] & (dim < width)[None, :],
    )
