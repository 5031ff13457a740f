# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM108 - conditions on constants stand alone
"""Row intervals inside the kernels: which tiles need a mask, and the mask.

Row s sees the keys start(s) <= t < end(s), both non-decreasing in s. So the rows s0 .. s1 see all keys of a
tile if start(s1) <= the first and the last < end(s0), and only other tiles pay for a mask. Seen from a key
it is the same: key t is seen by a range of rows whose bounds do not decrease in t. The forward, which stays
with its rows, asks for keys; the backward, which stays with its keys, asks for rows. MASK says where the
bounds come from: FULL, every row sees every key and no tile needs a mask; BAND, from s - t between lo and hi;
ARRAY, from two int32 arrays."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from meshattn_kernels.hopper.shim import aggregate

FULL = gl.constexpr(0)
BAND = gl.constexpr(1)
ARRAY = gl.constexpr(2)
NEVER = gl.constexpr(2**31 - 1)
"""A row that does not exist."""


@aggregate
class Rows:
    """The intervals of a call as kernel arguments; with a band the pointers are not read, else lo and hi
    not."""

    start: gl.tensor  # pointers to int32 [C_q]; in the backward [C_k]: first row of each key, and one more
    end: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    n_q: gl.tensor  # at least 1
    n_k: gl.tensor

    @gluon.constexpr_function
    def __init__(self, start, end, lo, hi, n_q, n_k):
        self.start, self.end, self.lo, self.hi = start, end, lo, hi
        self.n_q, self.n_k = n_q, n_k


@aggregate
class Bounds:
    """What is seen of the rows or keys that a task stays with: by all of them ``common_start`` to
    ``common_end``, by each ``start`` to ``end``, vectors. These only ARRAY has: loaded once a task, because
    every masked tile would wait for them. A band computes them where it masks, and needs no registers for
    them elsewhere."""

    common_start: gl.tensor
    common_end: gl.tensor
    start: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, common_start, common_end, start, end):
        self.common_start, self.common_end, self.start, self.end = common_start, common_end, start, end


@gluon.jit
def bounds_of_rows(rows, first, ROWS: gl.constexpr, LAYOUT: gl.constexpr, MASK: gl.constexpr):
    """Of the rows first .. first + ROWS - 1, in keys."""
    common_start, common_end = common_keys(rows, first, ROWS, MASK)
    start, end = common_start, common_end
    if MASK == ARRAY:
        row = gl.minimum(first + gl.arange(0, ROWS, layout=LAYOUT), rows.n_q - 1)
        start, end = gl.load(rows.start + row), gl.load(rows.end + row)
    return Bounds(common_start, common_end, start, end)


@gluon.jit
def bounds_of_keys(rows, first, KEYS: gl.constexpr, LAYOUT: gl.constexpr, MASK: gl.constexpr):
    """Of the keys first .. first + KEYS - 1, in rows."""
    common_start, _ = key_bounds(rows, first + (KEYS - 1), MASK)
    _, common_end = key_bounds(rows, first, MASK)
    start, end = common_start, common_end
    if MASK == ARRAY:
        start, end = key_bounds(rows, first + gl.arange(0, KEYS, layout=LAYOUT), MASK)
    return Bounds(common_start, common_end, start, end)


@gluon.jit
def common_keys(rows, first, ROWS: gl.constexpr, MASK: gl.constexpr):
    """Start and end of the keys that all of the rows first .. first + ROWS - 1 see. Padding rows do not
    count."""
    if MASK == ARRAY:
        begin = gl.load(rows.start + gl.minimum(first + ROWS, rows.n_q) - 1)
        end = gl.load(rows.end + gl.minimum(first, rows.n_q - 1))
    else:
        begin = first + (ROWS - 1) - rows.hi
        end = gl.minimum(first + 1 - rows.lo, rows.n_k)
    return begin, end


@gluon.jit
def seen_keys(rows, first, ROWS: gl.constexpr, MASK: gl.constexpr):
    """Start and end of the keys that any of the rows first .. first + ROWS - 1 sees; an end of 0 if they are
    all padding."""
    last = gl.minimum(first + ROWS, rows.n_q) - 1
    if MASK == ARRAY:
        begin = gl.load(rows.start + gl.minimum(first, rows.n_q - 1))
        end = gl.load(rows.end + last)
    else:
        begin = first - rows.hi
        end = gl.minimum(last + 1 - rows.lo, rows.n_k)
    return begin, gl.where(first < rows.n_q, end, 0)


@gluon.jit
def row_starts(rows, bounds, row, MASK: gl.constexpr):
    """Start of each row of a vector, those of ``bounds``. Of padding rows it means nothing."""
    if MASK == ARRAY:
        start = bounds.start
    else:
        start = row - rows.hi
    return start


@gluon.jit
def row_ends(rows, bounds, row, MASK: gl.constexpr):
    """End of each row of a vector, those of ``bounds``. Of padding rows it means nothing."""
    if MASK == ARRAY:
        end = bounds.end
    else:
        end = gl.minimum(row - rows.lo + 1, rows.n_k)
    return end


@gluon.jit
def key_bounds(rows, key, MASK: gl.constexpr):
    """First row that sees each key (or one key), and the row after the last. Padding keys are seen by
    none."""
    if MASK == ARRAY:
        at = gl.minimum(key, rows.n_k - 1)
        first = gl.load(rows.start + at)
        end = gl.load(rows.end + at)
    else:
        first = key + rows.lo
        end = key + rows.hi + 1
    return gl.where(key < rows.n_k, first, NEVER), gl.where(key < rows.n_k, end, 0)
