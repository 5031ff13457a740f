# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Backward in two kernels, seven matrix products and no waits: deterministic by construction.

``dkdv_kernel`` walks the query tiles that see one key/value tile, ``dq_kernel`` the key/value tiles that one
query tile sees, and forms s and p * (dp - delta) a second time. No sum crosses a program. With p = exp(s -
lse) and ds = p * (do v^T - delta): dv = p^T do, dk = ds^T q, dq = ds k; ``finish`` applies the softmax
scale.
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
    tile_keys,
    tile_rows,
)


@triton.jit(do_not_specialize=["lo", "hi", "n_q", "n_k", "rows", "keys", "part_stride"])
def dkdv_kernel(
    q_ptr,  # [B, C_q, H, D]
    k_ptr,  # [B, C_k, H_kv, D]
    v_ptr,  # [B, C_k, H_kv, D_v]
    do_ptr,  # [B, C_q, H, D_v]
    lse_ptr,  # fp32 [B, H, C_q], contiguous
    delta_ptr,
    dk_ptr,  # fp32 [B, C_k, H_kv, D], contiguous; several of them when the group is cut into parts
    dv_ptr,  # fp32 [B, C_k, H_kv, D_v], contiguous
    start_ptr,
    end_ptr,
    lo,
    hi,
    n_q,
    n_k,
    rows,
    keys,
    group,  # query heads of a key/value head
    part_heads,  # of which a program sums so many, in order
    part_stride,  # elements between the dk (and dv) of two parts
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
    FIRST: tl.constexpr,
):
    # Under a causal rule the first keys are seen by most rows: longest first.
    t0 = tl.program_id(0) * KV_TILE
    parts = group // part_heads
    kv_head = (tl.program_id(1) // parts).to(tl.int64)
    part = tl.program_id(1) % parts
    kv_heads = tl.num_programs(1) // parts
    batch = tl.program_id(2).to(tl.int64)
    begin, stop = tile_rows(t0, start_ptr, end_ptr, lo, hi, n_q, n_k, KV_TILE, BAND)
    first_tile = begin // Q_TILE
    tiles = tl.where(begin < stop, (stop + Q_TILE - 1) // Q_TILE - first_tile, 0)
    if not FIRST and tiles == 0:
        return

    dk = tl.zeros((KV_TILE, PADDED_D), tl.float32)
    dv = tl.zeros((KV_TILE, PADDED_D_V), tl.float32)
    if tiles > 0:
        scale_log2 = scale * LOG2E
        row_scale = -1.0 / scale_log2
        head = kv_head * group + part * part_heads
        q_ptr += batch * q_stride_b + head * q_stride_h
        do_ptr += batch * do_stride_b + head * do_stride_h
        lse_ptr += (batch * kv_heads * group + head) * rows
        delta_ptr += (batch * kv_heads * group + head) * rows
        k_ptr += batch * k_stride_b + kv_head * k_stride_h
        v_ptr += batch * v_stride_b + kv_head * v_stride_h
        k = load_tile(k_ptr, t0, n_k, k_stride_s, KV_TILE, D, PADDED_D)
        v = load_tile(v_ptr, t0, n_k, v_stride_s, KV_TILE, D_V, PADDED_D_V)
        # One loop over (head of the part, query tile), so that loads run ahead across heads too.
        for step in tl.range(0, tiles * part_heads, num_stages=STAGES, disable_licm=True):
            n = tl.cast(step // tiles, tl.int64)
            r0 = (first_tile + step % tiles) * Q_TILE
            q = load_tile(q_ptr + n * q_stride_h, r0, n_q, q_stride_s, Q_TILE, D, PADDED_D)
            lse, delta = load_row_terms(lse_ptr + n * rows, delta_ptr + n * rows, r0, n_q, Q_TILE)
            scores = product(k, q.T, tl.broadcast_to(lse[None, :] * row_scale, (KV_TILE, Q_TILE)), PRECISION)
            do = load_tile(do_ptr + n * do_stride_h, r0, n_q, do_stride_s, Q_TILE, D_V, PADDED_D_V)
            p = tl.math.exp2(scores * scale_log2)
            if not sees_all(r0, t0, start_ptr, end_ptr, lo, hi, n_q, n_k, Q_TILE, KV_TILE, BAND):
                row = r0 + tl.minimum(tl.arange(0, Q_TILE), n_q - 1 - r0)
                start, end = row_bounds(row, start_ptr, end_ptr, lo, hi, n_k, BAND)
                key = t0 + tl.arange(0, KV_TILE)
                visible = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
                p = tl.where(visible, p, 0.0)
            dv = product(p.to(do.dtype), do, dv, PRECISION)
            dp = product(v, do.T, tl.broadcast_to(-delta[None, :], (KV_TILE, Q_TILE)), PRECISION)
            ds = p * dp
            dk = product(ds.to(q.dtype), q, dk, PRECISION)

    row = batch * keys * kv_heads + kv_head
    dk_ptr += part * part_stride.to(tl.int64) * D + row * D
    dv_ptr += part * part_stride.to(tl.int64) * D_V + row * D_V
    add_tile(dk_ptr, dk, t0, keys, kv_heads * D, FIRST, KV_TILE, D, PADDED_D)
    add_tile(dv_ptr, dv, t0, keys, kv_heads * D_V, FIRST, KV_TILE, D_V, PADDED_D_V)


@triton.jit(do_not_specialize=["lo", "hi", "n_q", "n_k", "rows"])
def dq_kernel(
    q_ptr,  # [B, C_q, H, D]
    k_ptr,  # [B, C_k, H_kv, D]
    v_ptr,  # [B, C_k, H_kv, D_v]
    do_ptr,  # [B, C_q, H, D_v]
    lse_ptr,  # fp32 [B, H, C_q], contiguous
    delta_ptr,
    dq_ptr,  # fp32 [B, C_q, H, D], contiguous
    start_ptr,
    end_ptr,
    lo,
    hi,
    n_q,
    n_k,
    rows,
    group,
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
    FIRST: tl.constexpr,
):
    r0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * Q_TILE
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    begin, stop, full_begin, full_stop = tile_keys(
        r0, start_ptr, end_ptr, lo, hi, n_q, n_k, Q_TILE, KV_TILE, BAND
    )
    if not FIRST and begin >= stop:
        return

    dq = tl.zeros((Q_TILE, PADDED_D), tl.float32)
    if begin < stop:
        scale_log2 = scale * LOG2E
        row = r0 + tl.minimum(tl.arange(0, Q_TILE), n_q - 1 - r0)
        start, end = row_bounds(row, start_ptr, end_ptr, lo, hi, n_k, BAND)
        term = (batch * heads + head) * rows
        lse, delta = load_row_terms(lse_ptr + term, delta_ptr + term, r0, n_q, Q_TILE)
        q_ptr += batch * q_stride_b + head * q_stride_h
        do_ptr += batch * do_stride_b + head * do_stride_h
        k_ptr += batch * k_stride_b + head // group * k_stride_h
        v_ptr += batch * v_stride_b + head // group * v_stride_h
        q = load_tile(q_ptr, r0, n_q, q_stride_s, Q_TILE, D, PADDED_D)
        do = load_tile(do_ptr, r0, n_q, do_stride_s, Q_TILE, D_V, PADDED_D_V)
        for t0 in tl.range(begin, stop, KV_TILE, num_stages=STAGES, disable_licm=True):
            k = load_tile(k_ptr, t0, n_k, k_stride_s, KV_TILE, D, PADDED_D)
            scores = product(q, k.T, None, PRECISION)  # [Q_TILE, KV_TILE]
            v = load_tile(v_ptr, t0, n_k, v_stride_s, KV_TILE, D_V, PADDED_D_V)
            dp = product(do, v.T, None, PRECISION)
            p = tl.math.exp2(scores * scale_log2 - lse[:, None])
            if (t0 < full_begin) | (t0 + KV_TILE > full_stop):
                key = t0 + tl.arange(0, KV_TILE)
                visible = (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])
                p = tl.where(visible, p, 0.0)
            ds = p * (dp - delta[:, None])
            dq = product(ds.to(k.dtype), k, dq, PRECISION)

    dq_ptr += (batch * rows * heads + head) * D
    add_tile(dq_ptr, dq, r0, rows, heads * D, FIRST, Q_TILE, D, PADDED_D)
