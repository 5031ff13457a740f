# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Device functions that all kernels share: which keys a row sees, which rows see a key, and loading of tiles.

Rows are query rows. A tile reaches beyond the real rows (n_q) or keys (n_k) where these divide by nothing:
its surplus lanes load the last real row or key again, so that padding is never read, and are masked out
later. That costs one minimum a lane, where a load mask would cost a predicate and a zero fill.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PROBES = tl.constexpr(128)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b in fp32. The interpreter would multiply the bit patterns of bfloat16: it gets them
    promoted."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def row_bounds(row, start_ptr, end_ptr, lo, hi, n_k, BAND: tl.constexpr):
    """Start and end of the keys that each row sees; rows below n_q only. See
    ``meshattn_kernels.intervals``."""
    if BAND:
        start = tl.minimum(tl.maximum(row - hi, 0), n_k)
        end = tl.minimum(tl.maximum(row - lo + 1, 0), n_k)
    else:
        start = tl.load(start_ptr + row)
        end = tl.load(end_ptr + row)
    return start, end


@triton.jit
def tile_keys(
    r0, start_ptr, end_ptr, lo, hi, n_q, n_k, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, BAND: tl.constexpr
):
    """Keys that matter to the rows r0 .. r0 + Q_TILE - 1.

    Returns begin, stop, full_begin, full_stop: key tiles start at begin, begin + KV_TILE, ..., below stop;
    those within [full_begin, full_stop) are seen whole by every real row.
    """
    first = tl.minimum(r0, tl.maximum(n_q - 1, 0))
    last = tl.minimum(r0 + Q_TILE, n_q) - 1
    first_start, first_end = row_bounds(first, start_ptr, end_ptr, lo, hi, n_k, BAND)
    last_start, last_end = row_bounds(tl.maximum(last, 0), start_ptr, end_ptr, lo, hi, n_k, BAND)
    begin = first_start // KV_TILE * KV_TILE
    stop = tl.where((r0 < n_q) & (first_start < last_end), last_end, begin)
    return begin, stop, last_start, first_end


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
def tile_rows(t0, start_ptr, end_ptr, lo, hi, n_q, n_k, KV_TILE: tl.constexpr, BAND: tl.constexpr):
    """Rows [begin, stop) that see any of the keys t0 .. t0 + KV_TILE - 1; empty rows may lie between."""
    t1 = tl.minimum(t0 + KV_TILE, n_k)
    if BAND:
        begin = tl.maximum(t0 + lo, 0)
        stop = tl.minimum(t1 + hi, n_q)
    else:
        begin = count_at_most(end_ptr, n_q, t0)
        stop = count_at_most(start_ptr, n_q, t1 - 1)
    stop = tl.where((t0 < n_k) & (begin < stop), stop, begin)
    return begin, stop


@triton.jit
def sees_all(
    r0,
    t0,
    start_ptr,
    end_ptr,
    lo,
    hi,
    n_q,
    n_k,
    Q_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    BAND: tl.constexpr,
):
    """Whether every real row from r0 on sees every key t0 .. t0 + KV_TILE - 1, so that no mask is needed."""
    if BAND:
        last = tl.minimum(r0 + Q_TILE, n_q) - 1
        return (last - hi <= t0) & (r0 - lo + 1 >= t0 + KV_TILE) & (t0 + KV_TILE <= n_k)
    else:
        last = tl.minimum(r0 + Q_TILE, n_q) - 1
        return (tl.load(start_ptr + last) <= t0) & (tl.load(end_ptr + r0) >= t0 + KV_TILE)


@triton.jit
def load_tile(ptr, r0, size, stride_row, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Rows r0 .. r0 + ROWS - 1 of a matrix with ``size`` rows, as [ROWS, PADDED]: zero from dim DIM on."""
    row = tl.minimum(tl.arange(0, ROWS), size - 1 - r0)
    dim = tl.arange(0, PADDED)
    ptrs = ptr + tl.cast(r0, tl.int64) * stride_row + (row[:, None] * stride_row + dim[None, :])
    if DIM == PADDED:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=dim[None, :] < DIM, other=0.0)


@triton.jit
def load_row_terms(lse_ptr, delta_ptr, r0, n_q, ROWS: tl.constexpr):
    """lse in base 2 and delta of the rows from r0 on.

    A row that is padding or sees no key (lse -inf) gets lse +inf, so that each of its p = exp2(s - lse) is 0.
    """
    lane = tl.arange(0, ROWS)
    row = r0 + tl.minimum(lane, n_q - 1 - r0)
    lse = tl.load(lse_ptr + row)
    delta = tl.load(delta_ptr + row)
    hidden = (lse == float("-inf")) | (r0 + lane >= n_q)
    return tl.where(hidden, float("inf"), lse * LOG2E), delta


@triton.jit
def add_tile(
    ptr, value, r0, size, stride_row, first, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr
):
    """Add ``value`` [ROWS, PADDED] to fp32 rows of memory that no other program touches; with ``first``
    write it.

    Memory that is written first may hold NaN: it is not read then.
    """
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED)
    ptrs = ptr + tl.cast(r0, tl.int64) * stride_row + (row[:, None] * stride_row + dim[None, :])
    mask = (r0 + row < size)[:, None] & (dim < DIM)[None, :]
    if not first:
        value += tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    tl.store(ptrs, value, mask=mask)
