# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Backward in two kernels, seven matrix products and no waits: deterministic by construction.

``dkdv_kernel`` walks the query tiles that see one key/value tile, ``dq_kernel`` the key/value tiles that one
query tile sees, and forms s and p * (dp - delta) a second time. No sum crosses a program. The formulas are
those of ``backward_step``. Tiles with and without a mask have a loop each: a branch in one loop for both
keeps the compiler from overlapping products and loads, and cost 15 percent on an H200.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshattn_kernels.portable.backward_step import MASKED, UNMASKED, add_to_dkdv
from meshattn_kernels.portable.scores import SCORE_NUMBERS, is_kept, tanh
from meshattn_kernels.portable.tiles import (
    HEAD_STRIDES,
    add_tile,
    head_offset,
    in_registers,
    load_rows,
    load_terms,
    load_tile,
    masked_tile,
    power,
    product,
    row_bounds,
    term_rows,
    tile_keys,
    tile_rows,
    to_base,
)

NUMBERS = ("lo", "hi", "n_q", "n_k", "rows", "group", "factor", "scale", *SCORE_NUMBERS, *HEAD_STRIDES)
"""Of both kernels."""


@triton.jit(do_not_specialize=[*NUMBERS, "keys", "part_heads", "part_stride"])
def dkdv_kernel(
    q_ptr,  # [B, C_q, H, D]
    k_ptr,  # [B, C_k, H_kv, D]
    v_ptr,  # [B, C_k, H_kv, D_v]
    do_ptr,  # [B, C_q, H, D_v]
    terms_ptr,  # fp32 [B, H, rows of whole tiles, 2], contiguous
    words_ptr,  # int64 [B, H, C_q], contiguous
    dk_ptr,  # [B, C_k, H_kv, D], contiguous; several of them when the group is cut into parts
    dv_ptr,  # [B, C_k, H_kv, D_v], contiguous; both fp32, or with FIRST of any type
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
    factor,  # of dk
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
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
):
    # Under a causal rule the first keys are seen by most rows: longest first.
    t0 = tl.program_id(0) * KV_TILE
    parts = group // part_heads
    kv_head = (tl.program_id(1) // parts).to(tl.int64)
    part = tl.program_id(1) % parts
    kv_heads = tl.num_programs(1) // parts
    batch = tl.program_id(2).to(tl.int64)
    bounds = start_ptr, end_ptr, lo, hi, n_q, n_k
    first, full, full_end, end = tile_rows(t0, bounds, Q_TILE, KV_TILE, BAND)
    if not FIRST and first == end:
        return

    dk = tl.zeros((KV_TILE, PADDED_D), tl.float32)
    dv = tl.zeros((KV_TILE, PADDED_D_V), tl.float32)
    if first < end:
        exponent_scale = to_base(scale, SINGLE)
        dropout = threshold, (k_offset, k_step, k_split, k_jump)
        head = kv_head * group + part * part_heads
        q_ptr += head_offset(batch, head, q_stride_b, q_stride_h, STRIDE_UNIT)
        do_ptr += head_offset(batch, head, do_stride_b, do_stride_h, STRIDE_UNIT)
        head_terms = term_rows(rows) * 2
        terms_ptr += (batch * kv_heads * group + head) * head_terms
        words_ptr += (batch * kv_heads * group + head) * rows
        k_ptr += head_offset(batch, kv_head, k_stride_b, k_stride_h, STRIDE_UNIT)
        v_ptr += head_offset(batch, kv_head, v_stride_b, v_stride_h, STRIDE_UNIT)
        k = load_tile(k_ptr, t0, n_k, K_STRIDE, KV_TILE, D, PADDED_D)
        v = load_tile(v_ptr, t0, n_k, V_STRIDE, KV_TILE, D_V, PADDED_D_V)
        if HELD:
            k = in_registers(k, PADDED_D, SINGLE)
            if PADDED_D_V <= 64:  # there are no registers for both of the wider ones
                v = in_registers(v, PADDED_D_V, SINGLE)
        # Loops over (head of the part, query tile), so that loads run ahead across heads too. Both are
        # counted: a division in every step would delay its loads.
        masked = full - first + end - full_end
        n = tl.cast(0, tl.int64)
        step = 0
        # One stage less leaves its bounds of rows the shared memory that two thread blocks can have.
        for _ in tl.range(0, masked * part_heads, num_stages=STAGES - HELD, disable_licm=not HOIST):
            r0 = masked_tile(step, first, full, full_end) * Q_TILE
            dk, dv, _ds = add_to_dkdv(
                dk, dv, k, v, q_ptr + n * q_stride_h * STRIDE_UNIT, do_ptr + n * do_stride_h * STRIDE_UNIT,
                terms_ptr + n * head_terms, words_ptr + n * rows, r0, t0, bounds, exponent_scale, cap_scale,
                keep_scale, dropout,
                Q_STRIDE, DO_STRIDE, D, D_V, PADDED_D, PADDED_D_V, Q_TILE, KV_TILE, SINGLE, SOFTCAP, DROPOUT,
                BAND, MASKED,
            )  # fmt: skip
            step += 1
            n += step == masked
            step = tl.where(step == masked, 0, step)
        whole = full_end - full
        n = tl.cast(0, tl.int64)
        tile = full
        for _ in tl.range(0, whole * part_heads, num_stages=STAGES, disable_licm=not HOIST):
            r0 = tile * Q_TILE
            dk, dv, _ds = add_to_dkdv(
                dk, dv, k, v, q_ptr + n * q_stride_h * STRIDE_UNIT, do_ptr + n * do_stride_h * STRIDE_UNIT,
                terms_ptr + n * head_terms, words_ptr + n * rows, r0, t0, bounds, exponent_scale, cap_scale,
                keep_scale, dropout,
                Q_STRIDE, DO_STRIDE, D, D_V, PADDED_D, PADDED_D_V, Q_TILE, KV_TILE, SINGLE, SOFTCAP, DROPOUT,
                BAND, UNMASKED,
            )  # fmt: skip
            tile += 1
            n += tile == full_end
            tile = tl.where(tile == full_end, full, tile)

    if DROPOUT:
        dv *= keep_scale
    row = batch * keys * kv_heads + kv_head
    dk_ptr += part * part_stride.to(tl.int64) * D + row * D
    dv_ptr += part * part_stride.to(tl.int64) * D_V + row * D_V
    add_tile(dk_ptr, dk * factor, t0, keys, kv_heads * D, FIRST, KV_TILE, D, PADDED_D)
    add_tile(dv_ptr, dv, t0, keys, kv_heads * D_V, FIRST, KV_TILE, D_V, PADDED_D_V)


@triton.jit(do_not_specialize=[*NUMBERS])
def dq_kernel(
    q_ptr,  # [B, C_q, H, D]
    k_ptr,  # [B, C_k, H_kv, D]
    v_ptr,  # [B, C_k, H_kv, D_v]
    do_ptr,  # [B, C_q, H, D_v]
    terms_ptr,  # fp32 [B, H, rows of whole tiles, 2], contiguous
    words_ptr,  # int64 [B, H, C_q], contiguous
    dq_ptr,  # [B, C_q, H, D], contiguous: fp32, or with FIRST of any type
    start_ptr,
    end_ptr,
    lo,
    hi,
    n_q,
    n_k,
    rows,
    group,
    factor,  # of dq
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
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
):
    r0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * Q_TILE
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    bounds = start_ptr, end_ptr, lo, hi, n_q, n_k
    first, full, full_end, end = tile_keys(r0, bounds, Q_TILE, KV_TILE, BAND)
    if not FIRST and first == end:
        return

    dq = tl.zeros((Q_TILE, PADDED_D), tl.float32)
    if first < end:
        exponent_scale = to_base(scale, SINGLE)
        dropout = threshold, (k_offset, k_step, k_split, k_jump)
        row = r0 + tl.arange(0, Q_TILE)
        start, stop = row_bounds(tl.minimum(row, n_q - 1), bounds, BAND)
        exponent, delta = load_terms(terms_ptr + (batch * heads + head) * term_rows(rows) * 2, r0, Q_TILE)
        words = row
        if DROPOUT:
            words = load_rows(words_ptr + (batch * heads + head) * rows, r0, n_q, Q_TILE)
        q_ptr += head_offset(batch, head, q_stride_b, q_stride_h, STRIDE_UNIT)
        do_ptr += head_offset(batch, head, do_stride_b, do_stride_h, STRIDE_UNIT)
        k_ptr += head_offset(batch, head // group, k_stride_b, k_stride_h, STRIDE_UNIT)
        v_ptr += head_offset(batch, head // group, v_stride_b, v_stride_h, STRIDE_UNIT)
        q = load_tile(q_ptr, r0, n_q, Q_STRIDE, Q_TILE, D, PADDED_D)
        do = load_tile(do_ptr, r0, n_q, DO_STRIDE, Q_TILE, D_V, PADDED_D_V)
        if HELD:
            q = in_registers(q, PADDED_D, SINGLE)
            do = in_registers(do, PADDED_D_V, SINGLE)
        for tile in tl.range(full, full_end, num_stages=STAGES, disable_licm=not HOIST):
            dq = add_to_dq(
                dq, q, do, exponent, delta, k_ptr, v_ptr, words, tile * KV_TILE, start, stop, n_k,
                exponent_scale, cap_scale, keep_scale, dropout,
                K_STRIDE, V_STRIDE, D, D_V, PADDED_D, PADDED_D_V, KV_TILE, SINGLE, SOFTCAP, DROPOUT, False,
            )  # fmt: skip
        for n in tl.range(0, full - first + end - full_end, num_stages=STAGES, disable_licm=not HOIST):
            t0 = masked_tile(n, first, full, full_end) * KV_TILE
            dq = add_to_dq(
                dq, q, do, exponent, delta, k_ptr, v_ptr, words, t0, start, stop, n_k,
                exponent_scale, cap_scale, keep_scale, dropout,
                K_STRIDE, V_STRIDE, D, D_V, PADDED_D, PADDED_D_V, KV_TILE, SINGLE, SOFTCAP, DROPOUT, True,
            )  # fmt: skip

    dq_ptr += (batch * rows * heads + head) * D
    add_tile(dq_ptr, dq * factor, r0, rows, heads * D, FIRST, Q_TILE, D, PADDED_D)


@triton.jit
def add_to_dq(
    dq,
    q,
    do,
    exponent,
    delta,
    k_ptr,
    v_ptr,
    words,
    t0,
    start,
    stop,
    n_k,
    exponent_scale,
    cap_scale,
    keep_scale,
    dropout,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_D_V: tl.constexpr,
    KV_TILE: tl.constexpr,
    SINGLE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """dq of a query tile with what the keys from t0 on add; start and stop bound the keys that a row sees."""
    k = load_tile(k_ptr, t0, n_k, K_STRIDE, KV_TILE, D, PADDED_D, not MASKED)
    scores = product(q, k.T, None, SINGLE)  # [Q_TILE, KV_TILE]
    v = load_tile(v_ptr, t0, n_k, V_STRIDE, KV_TILE, D_V, PADDED_D_V, not MASKED)
    dp = product(do, v.T, None, SINGLE)
    if SOFTCAP:
        scores = tanh(scores * cap_scale)
    p = power(scores * exponent_scale - exponent[:, None], SINGLE)
    key = t0 + tl.arange(0, KV_TILE)
    if MASKED:
        p = tl.where((key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None]), p, 0.0)
    if DROPOUT:
        dp = tl.where(is_kept(words[:, None], key[None, :], dropout), dp * keep_scale, 0.0)
    ds = p * (dp - delta[:, None])
    if SOFTCAP:
        ds *= 1.0 - scores * scores
    return product(ds.to(k.dtype), k, dq, SINGLE)
