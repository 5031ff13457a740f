# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Forward: one program a query tile and head walks the keys that its rows see, then merges into the
accumulator.

The online softmax is FlashAttention-2's (arXiv 2307.08691), in base 2. The running maximum starts at a large
negative number and hidden scores are -inf: were both infinite, a row that sees nothing would give NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshattn_kernels.portable.tiles import LN2, LOG2E, load_tile, product, row_bounds, tile_keys


@triton.jit(do_not_specialize=["lo", "hi", "n_q", "n_k", "rows"])
def forward_kernel(
    q_ptr,  # [B, C_q, H, D]
    k_ptr,  # [B, C_k, H_kv, D]
    v_ptr,  # [B, C_k, H_kv, D_v]
    out_ptr,  # fp32 [B, C_q, H, D_v], contiguous
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
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
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
    # The last rows see most keys under a causal rule: longest first.
    r0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * Q_TILE
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    begin, stop, full_begin, full_stop = tile_keys(
        r0, start_ptr, end_ptr, lo, hi, n_q, n_k, Q_TILE, KV_TILE, BAND
    )
    if not FIRST and begin >= stop:
        return

    lane = tl.arange(0, Q_TILE)
    row = r0 + lane
    q_ptr += batch * q_stride_b + head * q_stride_h
    k_ptr += batch * k_stride_b + head // group * k_stride_h
    v_ptr += batch * v_stride_b + head // group * v_stride_h
    dim = tl.arange(0, PADDED_D_V)
    lse_ptrs = lse_ptr + (batch * heads + head) * rows + row
    out_ptr += (batch * rows * heads + head) * D_V + tl.cast(r0, tl.int64) * (heads * D_V)
    out_ptrs = out_ptr + lane[:, None] * (heads * D_V) + dim[None, :]
    if FIRST:
        stored = row < rows
        maximum = tl.full((Q_TILE,), -1e30, tl.float32)
        total = tl.zeros((Q_TILE,), tl.float32)
        acc = tl.zeros((Q_TILE, PADDED_D_V), tl.float32)
    else:
        # The softmax goes on from the normalised sum of earlier blocks. A row that sees no key here keeps
        # its bits.
        start, end = row_bounds(r0 + tl.minimum(lane, n_q - 1 - r0), start_ptr, end_ptr, lo, hi, n_k, BAND)
        stored = (row < n_q) & (start < end)
        lse = tl.load(lse_ptrs, mask=stored, other=float("-inf"))
        maximum = tl.where(lse > float("-inf"), lse * LOG2E, -1e30)
        total = tl.where(lse > float("-inf"), 1.0, 0.0)
        acc = tl.load(out_ptrs, mask=stored[:, None] & (dim < D_V)[None, :], other=0.0)
    if begin < stop:
        scale_log2 = scale * LOG2E
        if FIRST:
            start, end = row_bounds(
                r0 + tl.minimum(lane, n_q - 1 - r0), start_ptr, end_ptr, lo, hi, n_k, BAND
            )
        q = load_tile(q_ptr, r0, n_q, q_stride_s, Q_TILE, D, PADDED_D)
        for t0 in tl.range(begin, stop, KV_TILE, num_stages=STAGES, disable_licm=True):
            k = load_tile(k_ptr, t0, n_k, k_stride_s, KV_TILE, D, PADDED_D)
            scores = product(q, k.T, None, PRECISION)  # [Q_TILE, KV_TILE]
            if (t0 < full_begin) | (t0 + KV_TILE > full_stop):
                key = t0 + tl.arange(0, KV_TILE)
                visible = (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])
                scores = tl.where(visible, scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale_log2)
            p = tl.math.exp2(scores * scale_log2 - new_maximum[:, None])
            rescale = tl.math.exp2(maximum - new_maximum)
            total = total * rescale + tl.sum(p, 1)
            acc *= rescale[:, None]
            v = load_tile(v_ptr, t0, n_k, v_stride_s, KV_TILE, D_V, PADDED_D_V)
            acc = product(p.to(v.dtype), v, acc, PRECISION)
            maximum = new_maximum

    # A row of -inf scores alone has a total of 0, as has one that saw no key, and both get lse -inf.
    seen = (total > 0.0) & (row < n_q)
    total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, (maximum + tl.math.log2(total)) * LN2, float("-inf"))
    acc = tl.where(seen[:, None], acc / total[:, None], 0.0)
    tl.store(lse_ptrs, lse, mask=stored)
    tl.store(out_ptrs, acc, mask=stored[:, None] & (dim < D_V)[None, :])
