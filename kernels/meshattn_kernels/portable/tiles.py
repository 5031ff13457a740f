# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Device functions that all kernels share: which keys a row sees, which rows see a key, and loading of tiles.

Rows are query rows. A tile reaches beyond the real rows (n_q) or keys (n_k) where these divide by nothing:
its surplus lanes load the last real row or key again, so that padding is never read, and are masked out
later. That costs one minimum a lane, where a load mask would cost a predicate and a zero fill.

``bounds`` are the intervals of a block as kernels get them, a tuple: start_ptr, end_ptr (used without BAND),
lo, hi (used with BAND), n_q, n_k.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PROBES = tl.constexpr(128)
FAR = tl.constexpr(2**30)
TERM_ROWS = tl.constexpr(128)
HEAD_STRIDES = tuple(f"{x}_stride_{dim}" for x in ("q", "k", "v", "do") for dim in ("b", "h"))
"""The strides of a launch, in units of STRIDE_UNIT elements."""
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def product(a, b, acc, SINGLE: tl.constexpr):
    """acc + a b in fp32; with SINGLE (fp32 inputs) without tensor cores. The interpreter would multiply the
    bit patterns of bfloat16: it gets them promoted."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    elif SINGLE:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def in_registers(tile, SIZE: tl.constexpr, SINGLE: tl.constexpr):
    """``tile`` [rows, SIZE] as the compiler keeps the result of a product, to stay in registers as the left
    factor of others: a product with the identity, which is exact."""
    index = tl.arange(0, SIZE)
    identity = tl.where(index[:, None] == index[None, :], 1.0, 0.0).to(tile.dtype)
    return product(tile, identity, None, SINGLE).to(tile.dtype)


@triton.jit
def power(x, SINGLE: tl.constexpr):
    """The exponential function of the softmax: in base 2, in which a GPU computes, for 16-bit inputs.

    float32 inputs take base e, because lse comes in base e: turned to base 2 it would be rounded once more,
    and an lse of 16 that is wrong by half of its last bit makes every p wrong by 8 of theirs.
    """
    if SINGLE:
        return tl.exp(x)
    else:
        return tl.math.exp2(x)


@triton.jit
def logarithm(x, SINGLE: tl.constexpr):
    """Inverse of ``power``."""
    if SINGLE:
        return tl.log(x)
    else:
        return tl.math.log2(x)


@triton.jit
def to_base(x, SINGLE: tl.constexpr):
    """Exponent of e as exponent of the base of ``power``."""
    if SINGLE:
        return x
    else:
        return x * LOG2E


@triton.jit
def from_base(x, SINGLE: tl.constexpr):
    """Inverse of ``to_base``."""
    if SINGLE:
        return x
    else:
        return x * LN2


@triton.jit
def row_bounds(row, bounds, BAND: tl.constexpr):
    """Start and end of the keys that each row sees; rows below n_q only. See
    ``meshattn_kernels.intervals``."""
    start_ptr, end_ptr, lo, hi, _, n_k = bounds
    if BAND:
        start = tl.minimum(tl.maximum(row - hi, 0), n_k)
        end = tl.minimum(tl.maximum(row - lo + 1, 0), n_k)
    else:
        start = tl.load(start_ptr + row)
        end = tl.load(end_ptr + row)
    return start, end


@triton.jit
def count_at_most(bound_ptr, size, limit):
    """How many of the ``size`` entries of a non-decreasing array are at most ``limit``; PROBES-fold
    search."""
    begin = size * 0
    left = size
    while left > 0:
        step = (left + PROBES - 1) // PROBES
        lane = tl.arange(0, PROBES)
        # The last entry of each run of `step` entries: if it is at most the limit, the whole run is.
        offset = lane * step + step - 1
        bound = tl.load(bound_ptr + begin + offset, mask=offset < left, other=2147483647)
        skipped = tl.sum((bound <= limit).to(tl.int32), 0) * step
        begin += skipped
        left = tl.minimum(step - 1, left - skipped)
    return begin


@triton.jit
def tile_range(begin, stop, full_begin, full_stop, TILE: tl.constexpr):
    """Tiles to walk: returns first, full, full_end, end, of which those of [full, full_end) need no mask.

    The tiles of [first, end) meet [begin, stop); those between lie within [full_begin, full_stop) besides.
    """
    first = begin // TILE
    end = tl.where(begin < stop, (stop + TILE - 1) // TILE, first)
    full = tl.minimum(tl.maximum((full_begin + TILE - 1) // TILE, first), end)
    full_end = tl.minimum(tl.maximum(full_stop // TILE, full), end)
    return first, full, full_end, end


@triton.jit
def masked_tile(n, first, full, full_end):
    """The n-th of the tiles that need a mask: those before ``full``, then those from ``full_end`` on."""
    return tl.where(n < full - first, first + n, full_end + n - (full - first))


@triton.jit
def tile_keys(r0, bounds, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, BAND: tl.constexpr):
    """``tile_range`` of the key tiles that matter to the rows r0 .. r0 + Q_TILE - 1; those that need no mask
    are seen whole by every real row."""
    _, _, _, _, n_q, _ = bounds
    first = tl.minimum(r0, tl.maximum(n_q - 1, 0))
    last = tl.minimum(r0 + Q_TILE, n_q) - 1
    first_start, first_end = row_bounds(first, bounds, BAND)
    last_start, last_end = row_bounds(tl.maximum(last, 0), bounds, BAND)
    stop = tl.where(r0 < n_q, last_end, first_start)
    return tile_range(first_start, stop, last_start, first_end, KV_TILE)


@triton.jit
def tile_rows(t0, bounds, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, BAND: tl.constexpr):
    """``tile_range`` of the row tiles that see any of the keys t0 .. t0 + KV_TILE - 1; empty rows may lie
    between. Those that need no mask consist of real rows, which see all of these keys."""
    start_ptr, end_ptr, lo, hi, n_q, n_k = bounds
    t1 = tl.minimum(t0 + KV_TILE, n_k)
    if BAND:
        begin = tl.maximum(t0 + lo, 0)
        stop = tl.minimum(t1 + hi, n_q)
        full_begin = tl.maximum(t1 - 1 + lo, 0)
        full_stop = tl.minimum(t0 + hi + 1, n_q)
    else:
        begin = count_at_most(end_ptr, n_q, t0)
        stop = count_at_most(start_ptr, n_q, t1 - 1)
        full_begin = count_at_most(end_ptr, n_q, t1 - 1)
        full_stop = count_at_most(start_ptr, n_q, t0)
    stop = tl.where(t0 < n_k, stop, begin)
    # A key tile that reaches beyond the last key needs a mask for every row.
    full_stop = tl.where(t0 + KV_TILE <= n_k, full_stop, full_begin)
    return tile_range(begin, stop, full_begin, full_stop, Q_TILE)


@triton.jit
def sees_all(r0, t0, bounds, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, BAND: tl.constexpr):
    """Whether the rows r0 .. r0 + Q_TILE - 1 are real and see every key t0 .. t0 + KV_TILE - 1: then no mask
    is needed."""
    start_ptr, end_ptr, lo, hi, n_q, n_k = bounds
    if BAND:
        whole = (r0 + Q_TILE - 1 - hi <= t0) & (r0 - lo + 1 >= t0 + KV_TILE) & (t0 + KV_TILE <= n_k)
    else:
        last = tl.minimum(r0 + Q_TILE, n_q) - 1
        whole = (tl.load(start_ptr + last) <= t0) & (tl.load(end_ptr + r0) >= t0 + KV_TILE)
    return whole & (r0 + Q_TILE <= n_q)


@triton.jit
def sees(r0, t0, bounds, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, BAND: tl.constexpr):
    """[KV_TILE, Q_TILE]: whether a row sees a key. Padded keys are seen by none, padded rows are not looked
    at."""
    _, _, lo, hi, n_q, n_k = bounds
    lane = tl.arange(0, Q_TILE)
    key = t0 + tl.arange(0, KV_TILE)
    if BAND:
        # One comparison without sign for both edges, which lie within the block.
        key = tl.where(key < n_k, key, FAR)
        from_low = ((r0 - lo + lane)[None, :] - key[:, None]).to(tl.uint32, bitcast=True)
        return from_low <= (hi - lo).to(tl.uint32, bitcast=True)
    else:
        start, end = row_bounds(r0 + tl.minimum(lane, n_q - 1 - r0), bounds, BAND)
        return (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])


@triton.jit
def head_offset(batch, head, stride_b, stride_h, STRIDE_UNIT: tl.constexpr):
    """Elements before a head. That strides come in units tells the compiler what divides them."""
    return (batch * stride_b + head * stride_h) * STRIDE_UNIT


@triton.jit
def load_tile(
    ptr,
    r0,
    size,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    WHOLE: tl.constexpr = False,
):
    """Rows r0 .. r0 + ROWS - 1 of a matrix with ``size`` rows, as [ROWS, PADDED]: zero from dim DIM on.

    WHOLE promises that all these rows exist.
    """
    row = tl.arange(0, ROWS)
    if not WHOLE:
        row = tl.minimum(row, size - 1 - r0)
    dim = tl.arange(0, PADDED)
    ptrs = ptr + tl.cast(r0, tl.int64) * STRIDE + (row[:, None] * STRIDE + dim[None, :])
    if DIM == PADDED:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=dim[None, :] < DIM, other=0.0)


@triton.jit
def load_rows(ptr, r0, n_q, ROWS: tl.constexpr, WHOLE: tl.constexpr = False):
    """One number a row, as ``load_tile``."""
    lane = tl.arange(0, ROWS)
    if not WHOLE:
        lane = tl.minimum(lane, n_q - 1 - r0)
    return tl.load(ptr + r0 + lane)


@triton.jit
def load_terms(ptr, r0, ROWS: tl.constexpr):
    """Exponent and delta of the rows from r0 on; see ``finish.row_terms_kernel``.

    As one tensor of pairs, which is copied ahead with one instruction a thread; two vectors took 32.
    """
    row = tl.arange(0, ROWS)
    exponent, delta = tl.split(tl.load(ptr + 2 * r0 + (2 * row[:, None] + tl.arange(0, 2)[None, :])))
    return exponent, delta


@triton.jit
def term_rows(rows):
    """Rows of a head in an array of terms: whole tiles."""
    return (rows + TERM_ROWS - 1) // TERM_ROWS * TERM_ROWS


@triton.jit
def add_tile(
    ptr, value, r0, size, stride_row, first, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr
):
    """Add ``value`` [ROWS, PADDED] to fp32 rows of memory that no other program touches; with ``first``
    write it, to rows of any type.

    Memory that is written first may hold NaN: it is not read then. An atomic addition, not for atomicity: it
    needs no registers for the sum so far.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED)
    ptrs = ptr + tl.cast(r0, tl.int64) * stride_row + (row[:, None] * stride_row + dim[None, :])
    mask = (r0 + row < size)[:, None] & (dim < DIM)[None, :]
    if first:
        tl.store(ptrs, value, mask=mask)
    else:
        tl.atomic_add(ptrs, value, mask=mask, sem="relaxed")
