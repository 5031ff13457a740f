# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""What changes scores and probabilities: softcap and dropout.

A softcap c makes scores c * tanh(scale * q k^T / c): kernels get scale / c as ``cap_scale``, take the tanh of
``cap_scale`` times the product, and go on with c in the place of the scale. Dropout is that of
``meshattn_kernels.dropout``: ``row_words_kernel`` makes the two words of every row before a pass, as one
number of 64 bits. What all keys have in common travels between device functions as a tuple, which is never
looked at where DROPOUT is off:

    threshold, positions of keys in steps of the Weyl sequence

Positions are tuples too: offset, stride, split, jump. What is kept is scaled in float32, behind the products:
scaled before, even a probability of 1 would be rounded to the type of the inputs.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from meshattn_kernels import dropout

SCORE_NUMBERS = "cap_scale", "threshold", "keep_scale", "k_offset", "k_step", "k_split", "k_jump"
"""The numbers of a launch that belong to them, in this order."""
TWO_IN_BASE_2 = tl.constexpr(2 * math.log2(math.e))
FIRST_MIX, LAST_MIX = tl.constexpr(dropout.MIX[0]), tl.constexpr(dropout.MIX[1])


@triton.jit
def tanh(x):
    """To 6e-7 of its value, which a large softcap multiplies: near 0 by a polynomial (Cephes)."""
    square = x * x
    small = -5.70498872745e-3 * square + 2.06390887954e-2
    small = small * square - 5.37397155531e-2
    small = small * square + 1.33314422036e-1
    small = small * square - 3.33332819422e-1
    small = small * square * x
    near = square < 0.39
    # 1 - 2 / (exp(2 x) + 1): a root is one instruction where a quotient is eight, and exp2 where exp is five.
    root = tl.rsqrt(tl.exp2(x * TWO_IN_BASE_2) + 1.0)
    # A sum of two choices: to choose between the sums needs more registers.
    return tl.where(near, x, 1.0) + tl.where(near, small, -2.0 * root * root)


@triton.jit
def positions(row, of):
    """Global positions of rows, modulo 2^32."""
    offset, stride, split, jump = of
    return offset + row * stride + tl.where(row >= split, jump, 0)


@triton.jit
def is_kept(words, key, dropout):
    """Which probabilities are kept, for the words of rows and keys of shapes that broadcast together."""
    threshold, keys = dropout
    word = positions(key, keys).to(tl.uint32, bitcast=True) + words.to(tl.uint32)
    word = (word ^ (word >> 16)) * FIRST_MIX
    word = (word ^ (word >> 15) ^ (words >> 32).to(tl.uint32)) * LAST_MIX
    return word >= tl.cast(threshold, tl.uint32, bitcast=True)


@triton.jit(
    do_not_specialize=[
        *("rows", "heads", "seed_low", "seed_high", "first_head", "q_offset", "q_step", "q_split", "q_jump")
    ]
)
def row_words_kernel(
    words_ptr,  # int64 [B, H, C_q], contiguous
    rows,
    heads,
    seed_low,
    seed_high,
    first_head,
    q_offset,
    q_step,
    q_split,
    q_jump,
    BLOCK: tl.constexpr,
):
    """The words of the rows of all heads: the first in the lower half, the second in the upper."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head, batch = tl.program_id(1), tl.program_id(2)
    seed = (tl.cast(seed_high, tl.int64) << 32) | (tl.cast(seed_low, tl.int64) & 0xFFFFFFFF)
    position = positions(row, (q_offset, q_step, q_split, q_jump))
    first, second, _, _ = tl.philox(seed, position, head + first_head, batch, batch * 0)
    words = (second.to(tl.int64) << 32) | (first.to(tl.int64) & 0xFFFFFFFF)
    words_ptr += (batch.to(tl.int64) * heads + head) * rows
    tl.store(words_ptr + row, words, mask=row < rows)
