# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""One tile of the backward, [keys, rows]: what both backward passes add to dk and dv.

With p = exp(s - lse) and ds = p * (do v^T - delta): dv = p^T do, dk = ds^T q, dq = ds k; ``finish`` applies
the softmax scale. lse and delta come as ``finish.row_terms_kernel`` pairs them. Scores lie with keys first,
so that p and ds go from registers into the next products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshattn_kernels.portable.scores import is_kept, tanh
from meshattn_kernels.portable.tiles import (
    load_rows,
    load_terms,
    load_tile,
    power,
    product,
    sees,
    sees_all,
)

UNMASKED = tl.constexpr(0)
MASKED = tl.constexpr(1)
MASKED_IF_NEEDED = tl.constexpr(2)


@triton.jit
def add_to_dkdv(
    dk,
    dv,
    k,
    v,
    q_ptr,
    do_ptr,
    terms_ptr,
    words_ptr,
    r0,
    t0,
    bounds,
    exponent_scale,
    cap_scale,
    keep_scale,
    dropout,
    Q_STRIDE: tl.constexpr,
    DO_STRIDE: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_D_V: tl.constexpr,
    Q_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    SINGLE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    BAND: tl.constexpr,
    MASK: tl.constexpr,
):
    """Add the rows r0 .. r0 + Q_TILE - 1 of one head to dk and dv of the keys from t0 on, k and v.

    Exponents and exponent_scale, the softmax scale, are in the base of ``power``. UNMASKED promises real rows
    that see all of these keys. Returns dk, dv, to which the scale of what dropout keeps is still due, and ds
    [KV_TILE, Q_TILE] in the type of the inputs.
    """
    WHOLE: tl.constexpr = MASK == UNMASKED
    _, _, _, _, n_q, _ = bounds
    q = load_tile(q_ptr, r0, n_q, Q_STRIDE, Q_TILE, D, PADDED_D, WHOLE)
    hidden = None
    if MASK == MASKED and not SOFTCAP:
        # As what the product is added to, it takes no registers beside the scores.
        hidden = tl.where(sees(r0, t0, bounds, Q_TILE, KV_TILE, BAND), 0.0, float("-inf"))
    scores = product(k, q.T, hidden, SINGLE)
    do = load_tile(do_ptr, r0, n_q, DO_STRIDE, Q_TILE, D_V, PADDED_D_V, WHOLE)
    # Before p, so that this product runs beside the exponentials.
    dp = product(v, do.T, None, SINGLE)
    if SOFTCAP:
        scores = tanh(scores * cap_scale)
    # Only now, so that they take no registers beside all others.
    exponent, delta = load_terms(terms_ptr, r0, Q_TILE)
    p = power(scores * exponent_scale - exponent[None, :], SINGLE)
    if MASK == MASKED and SOFTCAP:
        p = tl.where(sees(r0, t0, bounds, Q_TILE, KV_TILE, BAND), p, 0.0)
    elif MASK == MASKED_IF_NEEDED:
        needed = not sees_all(r0, t0, bounds, Q_TILE, KV_TILE, BAND)
        if needed:
            p = tl.where(sees(r0, t0, bounds, Q_TILE, KV_TILE, BAND), p, 0.0)
    kept = p
    if DROPOUT:
        words = load_rows(words_ptr, r0, n_q, Q_TILE, WHOLE)
        key = t0 + tl.arange(0, KV_TILE)
        keep = is_kept(words[None, :], key[:, None], dropout)
        kept = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    dv = product(kept.to(do.dtype), do, dv, SINGLE)
    ds = p * (dp - delta[None, :])
    if SOFTCAP:
        ds *= 1.0 - scores * scores
    ds = ds.to(q.dtype)
    dk = product(ds, q, dk, SINGLE)
    return dk, dv, ds
