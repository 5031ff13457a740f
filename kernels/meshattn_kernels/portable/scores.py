# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What changes scores and probabilities: softcap and dropout.

A softcap c makes scores c * tanh(scale * q k^T / c): kernels get scale / c as ``cap_scale``, take the tanh of
``cap_scale`` times the product, and go on with c in the place of the scale. Dropout is that of
``meshattn_kernels.dropout``. It travels between device functions as a tuple, which is never looked at where
DROPOUT is off:

    seed, threshold, batch, head, positions of queries, and of keys

Positions are tuples too: offset, stride, split, jump. What is kept is scaled in float32, behind the products:
scaled before, even a probability of 1 would be rounded to the type of the inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCORE_NUMBERS = (
    *("cap_scale", "seed_low", "seed_high", "threshold", "keep_scale", "first_head"),
    *("q_offset", "q_step", "q_split", "q_jump", "k_offset", "k_step", "k_split", "k_jump"),
)
"""The numbers of a launch that belong to them, in this order."""


@triton.jit
def tanh(x):
    """To some 1e-7 of its value, which a large softcap multiplies: near 0 by a polynomial (Cephes)."""
    square = x * x
    small = -5.70498872745e-3 * square + 2.06390887954e-2
    small = small * square - 5.37397155531e-2
    small = small * square + 1.33314422036e-1
    small = small * square - 3.33332819422e-1
    small = small * square * x
    near = square < 0.39
    # A sum of two choices: to choose between the sums needs more registers.
    return tl.where(near, x, 1.0) + tl.where(near, small, -2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def positions(row, of):
    """Global positions of rows, modulo 2^32."""
    offset, stride, split, jump = of
    return offset + row * stride + tl.where(row >= split, jump, 0)


@triton.jit
def pack_dropout(
    seed_low, seed_high, threshold, batch, head, first_head,
    q_offset, q_step, q_split, q_jump, k_offset, k_step, k_split, k_jump,
):  # fmt: skip
    seed = (tl.cast(seed_high, tl.int64) << 32) | (tl.cast(seed_low, tl.int64) & 0xFFFFFFFF)
    batch = tl.cast(batch, tl.int32)
    head = tl.cast(head, tl.int32) + first_head
    queries = (q_offset, q_step, q_split, q_jump)
    keys = (k_offset, k_step, k_split, k_jump)
    return seed, threshold, batch, head, queries, keys


@triton.jit
def is_kept(row, key, dropout):
    """Which probabilities of rows and keys are kept; row and key are of shapes that broadcast together."""
    seed, threshold, batch, head, queries, keys = dropout
    word, _, _, _ = tl.philox(seed, positions(key, keys), positions(row, queries), head, batch)
    return (word >> 1).to(tl.int32) >= threshold
