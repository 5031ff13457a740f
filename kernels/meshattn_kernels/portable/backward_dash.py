# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Backward in one persistent kernel of five matrix products, whose sums of dq follow a table (DASH).

Every worker does its tasks of a ``ScheduleTable`` in order (see ``meshattn_kernels.dash`` for the format): a
task holds a key/value tile and its dk, dv, walks some query tiles of one head and adds a part of dq to
memory at each, in the turn that the table gives it. The formulas are those of ``backward_two_loop``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshattn_kernels.portable.tiles import (
    LOG2E,
    add_tile,
    load_row_terms,
    load_tile,
    product,
    row_bounds,
    sees_all,
)
from meshattn_kernels.portable.turns import begin_turn, end_turn


@triton.jit(do_not_specialize=["lo", "hi", "n_q", "n_k", "rows", "keys", "query_tiles", "kv_tiles"])
def dash_kernel(
    q_ptr,  # [B, C_q, H, D]
    k_ptr,  # [B, C_k, H_kv, D]
    v_ptr,  # [B, C_k, H_kv, D_v]
    do_ptr,  # [B, C_q, H, D_v]
    lse_ptr,  # fp32 [B, H, C_q], contiguous
    delta_ptr,
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
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    do_stride_b,
    do_stride_s,
    do_stride_h,
    D: tl.constexpr,
    D_V: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_D_V: tl.constexpr,
    Q_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    BAND: tl.constexpr,
    FIRST_DQ: tl.constexpr,
    FIRST_DKV: tl.constexpr,
    ORDERED: tl.constexpr,
):
    scale_log2 = scale * LOG2E
    row_scale = -1.0 / scale_log2
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
        loads = (flags & 1) != 0  # dash.LOAD
        dk = tl.where(loads, 0.0, dk)
        dv = tl.where(loads, 0.0, dv)
        # A task without steps may lie beyond the last key: it reads a row that it does not use.
        size = tl.maximum(n_k, 1)
        k_tile_ptr = k_ptr + batch * k_stride_b + kv_head * k_stride_h
        v_tile_ptr = v_ptr + batch * v_stride_b + kv_head * v_stride_h
        k = load_tile(k_tile_ptr, t0, size, k_stride_s, KV_TILE, D, PADDED_D)
        v = load_tile(v_tile_ptr, t0, size, v_stride_s, KV_TILE, D_V, PADDED_D_V)
        q_head_ptr = q_ptr + batch * q_stride_b + head * q_stride_h
        do_head_ptr = do_ptr + batch * do_stride_b + head * do_stride_h
        row_term = tl.cast(batch_head, tl.int64) * rows
        dq_head_ptr = dq_ptr + (batch * rows * heads + head) * D
        head_counters_ptr = counters_ptr + batch_head * query_tiles

        for step in tl.range(first_step, first_step + num_steps, num_stages=STAGES, disable_licm=True):
            entry = tl.load(steps_ptr + step)
            query_tile = entry & 0xFFFF
            turn = entry >> 16  # dash.TURN_SHIFT
            r0 = query_tile * Q_TILE
            q = load_tile(q_head_ptr, r0, n_q, q_stride_s, Q_TILE, D, PADDED_D)
            lse, delta = load_row_terms(lse_ptr + row_term, delta_ptr + row_term, r0, n_q, Q_TILE)
            row_start = tl.broadcast_to(lse[None, :] * row_scale, (KV_TILE, Q_TILE))
            scores = product(k, q.T, row_start, PRECISION)  # [KV_TILE, Q_TILE]
            do = load_tile(do_head_ptr, r0, n_q, do_stride_s, Q_TILE, D_V, PADDED_D_V)
            p = tl.math.exp2(scores * scale_log2)
            if not sees_all(r0, t0, start_ptr, end_ptr, lo, hi, n_q, n_k, Q_TILE, KV_TILE, BAND):
                row = r0 + tl.minimum(lane, n_q - 1 - r0)
                start, end = row_bounds(row, start_ptr, end_ptr, lo, hi, n_k, BAND)
                key = t0 + tl.arange(0, KV_TILE)
                visible = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
                p = tl.where(visible, p, 0.0)
            dv = product(p.to(do.dtype), do, dv, PRECISION)
            dp = product(v, do.T, tl.broadcast_to(-delta[None, :], (KV_TILE, Q_TILE)), PRECISION)
            ds = (p * dp).to(q.dtype)
            dk = product(ds, q, dk, PRECISION)
            dq = product(ds.T, k, None, PRECISION)  # [Q_TILE, PADDED_D]

            dq_ptrs = dq_head_ptr + tl.cast(r0, tl.int64) * (heads * D) + dq_offset
            dq_mask = (r0 + lane < rows)[:, None] & (tl.arange(0, PADDED_D) < D)[None, :]
            if ORDERED:
                dq = begin_turn(head_counters_ptr + query_tile, turn, dq)
                # Predicates, no branch: triton 3.6 cannot compile one that uses an asynchronous product.
                if FIRST_DQ:
                    tl.store(dq_ptrs, dq, mask=dq_mask & (turn == 0))
                    tl.atomic_add(dq_ptrs, dq, mask=dq_mask & (turn > 0), sem="relaxed")
                else:
                    tl.atomic_add(dq_ptrs, dq, mask=dq_mask, sem="relaxed")
                end_turn(head_counters_ptr + query_tile, turn)
            else:
                tl.atomic_add(dq_ptrs, dq, mask=dq_mask, sem="relaxed")

        if (flags & 2) != 0:  # dash.STORE
            counter_ptr = counters_ptr + batch_heads * query_tiles + batch_kv_head * kv_tiles + kv_tile
            row = batch * keys * kv_heads + kv_head
            ours = dv
            if dkv_turn >= 0:
                ours = begin_turn(counter_ptr, dkv_turn, dv)
            first = FIRST_DKV and dkv_turn <= 0
            add_tile(dk_ptr + row * D, dk, t0, keys, kv_heads * D, first, KV_TILE, D, PADDED_D)
            add_tile(dv_ptr + row * D_V, ours, t0, keys, kv_heads * D_V, first, KV_TILE, D_V, PADDED_D_V)
            if dkv_turn >= 0:
                end_turn(counter_ptr, dkv_turn)


@triton.jit(do_not_specialize=["rows"])
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
