# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Forward: one program a query tile and head walks the keys that its rows see, then merges into the
accumulator.

The online softmax is FlashAttention-2's (arXiv 2307.08691), in base 2. The running maximum starts at a large
negative number and hidden scores are -inf: were both infinite, a row that sees nothing would give NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshattn_kernels.portable.scores import SCORE_NUMBERS, is_kept, tanh
from meshattn_kernels.portable.tiles import (
    HEAD_STRIDES,
    from_base,
    head_offset,
    in_registers,
    load_rows,
    load_tile,
    logarithm,
    masked_tile,
    power,
    product,
    row_bounds,
    tile_keys,
    to_base,
)


@triton.jit(
    do_not_specialize=["lo", "hi", "n_q", "n_k", "rows", "group", "scale", *SCORE_NUMBERS, *HEAD_STRIDES]
)
def forward_kernel(
    q_ptr,  # [B, C_q, H, D]
    k_ptr,  # [B, C_k, H_kv, D]
    v_ptr,  # [B, C_k, H_kv, D_v]
    words_ptr,  # int64 [B, H, C_q], contiguous
    out_ptr,  # [B, C_q, H, D_v], contiguous: fp32, or with FIRST of any type
    lse_ptr,  # fp32 [B, H, C_q], contiguous
    start_ptr,
    end_ptr,
    lo,
    hi,
    n_q,
    n_k,
    rows,
    group,
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
    STRIDE_UNIT: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
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
    # The last rows see most keys under a causal rule: longest first.
    r0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * Q_TILE
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    bounds = start_ptr, end_ptr, lo, hi, n_q, n_k
    first, full, full_end, end = tile_keys(r0, bounds, Q_TILE, KV_TILE, BAND)
    if not FIRST and first == end:
        return

    lane = tl.arange(0, Q_TILE)
    row = r0 + lane
    q_ptr += head_offset(batch, head, q_stride_b, q_stride_h, STRIDE_UNIT)
    k_ptr += head_offset(batch, head // group, k_stride_b, k_stride_h, STRIDE_UNIT)
    v_ptr += head_offset(batch, head // group, v_stride_b, v_stride_h, STRIDE_UNIT)
    dim = tl.arange(0, PADDED_D_V)
    lse_ptrs = lse_ptr + (batch * heads + head) * rows + row
    out_ptr += (batch * rows * heads + head) * D_V + tl.cast(r0, tl.int64) * (heads * D_V)
    out_ptrs = out_ptr + lane[:, None] * (heads * D_V) + dim[None, :]
    start, stop = row_bounds(r0 + tl.minimum(lane, n_q - 1 - r0), bounds, BAND)
    if FIRST:
        stored = row < rows
        maximum = tl.full((Q_TILE,), -1e30, tl.float32)
        total = tl.zeros((Q_TILE,), tl.float32)
        acc = tl.zeros((Q_TILE, PADDED_D_V), tl.float32)
    else:
        # The softmax goes on from the normalised sum of earlier blocks. A row that sees no key here keeps
        # its bits.
        stored = (row < n_q) & (start < stop)
        lse = tl.load(lse_ptrs, mask=stored, other=float("-inf"))
        empty = lse == float("-inf")  # and not "no number", which has to stay one
        maximum = tl.where(empty, -1e30, to_base(lse, SINGLE))
        total = tl.where(empty, 0.0, 1.0)
        acc = tl.load(out_ptrs, mask=stored[:, None] & (dim < D_V)[None, :], other=0.0)
        if DROPOUT:
            acc /= keep_scale
    if first < end:
        exponent_scale = to_base(scale, SINGLE)
        dropout = threshold, (k_offset, k_step, k_split, k_jump)
        words = row
        if DROPOUT:
            words = load_rows(words_ptr + (batch * heads + head) * rows, r0, n_q, Q_TILE)
        q = load_tile(q_ptr, r0, n_q, Q_STRIDE, Q_TILE, D, PADDED_D)
        if HELD:
            q = in_registers(q, PADDED_D, SINGLE)
        for tile in tl.range(full, full_end, num_stages=STAGES, disable_licm=not HOIST):
            acc, maximum, total = attend(
                acc, maximum, total, q, k_ptr, v_ptr, words, tile * KV_TILE, start, stop, n_k, exponent_scale,
                cap_scale, dropout,
                K_STRIDE, V_STRIDE, D, D_V, PADDED_D, PADDED_D_V, KV_TILE, SINGLE, SOFTCAP, DROPOUT, False,
            )  # fmt: skip
        for n in tl.range(0, full - first + end - full_end, num_stages=STAGES, disable_licm=not HOIST):
            t0 = masked_tile(n, first, full, full_end) * KV_TILE
            acc, maximum, total = attend(
                acc, maximum, total, q, k_ptr, v_ptr, words, t0, start, stop, n_k, exponent_scale,
                cap_scale, dropout,
                K_STRIDE, V_STRIDE, D, D_V, PADDED_D, PADDED_D_V, KV_TILE, SINGLE, SOFTCAP, DROPOUT, True,
            )  # fmt: skip

    # A row of -inf scores alone has a total of 0, as has one that saw no key, and both get lse -inf. A total
    # that is NaN makes lse and out NaN.
    seen = (total != 0.0) & (row < n_q)
    total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, from_base(maximum + logarithm(total, SINGLE), SINGLE), float("-inf"))
    acc = tl.where(seen[:, None], acc / total[:, None], 0.0)
    if DROPOUT:
        acc *= keep_scale
    tl.store(lse_ptrs, lse, mask=stored)
    tl.store(out_ptrs, acc, mask=stored[:, None] & (dim < D_V)[None, :])


@triton.jit
def attend(
    acc,
    maximum,
    total,
    q,
    k_ptr,
    v_ptr,
    words,
    t0,
    start,
    stop,
    n_k,
    exponent_scale,
    cap_scale,
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
    """One step of the online softmax over the keys from t0 on; start and stop bound the keys of a row."""
    k = load_tile(k_ptr, t0, n_k, K_STRIDE, KV_TILE, D, PADDED_D, not MASKED)
    scores = product(q, k.T, None, SINGLE)  # [Q_TILE, KV_TILE]
    if SOFTCAP:
        scores = tanh(scores * cap_scale)
    key = t0 + tl.arange(0, KV_TILE)
    if MASKED:
        visible = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * exponent_scale)
    p = power(scores * exponent_scale - new_maximum[:, None], SINGLE)
    rescale = power(maximum - new_maximum, SINGLE)
    total = total * rescale + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(is_kept(words[:, None], key[None, :], dropout), p, 0.0)
    v = load_tile(v_ptr, t0, n_k, V_STRIDE, KV_TILE, D_V, PADDED_D_V, not MASKED)
    acc = product(p.to(v.dtype), v, acc * rescale[:, None], SINGLE)
    return acc, new_maximum, total
