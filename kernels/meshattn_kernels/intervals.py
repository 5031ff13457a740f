"""Which keys of a block a query row sees: one half-open interval of key rows a query row.

Letters: a block is C_q query rows against C_k key rows, of which the first n_q and n_k are real, the rest
padding. Two forms, told apart by type: a band, four integers from which a kernel computes the bounds itself,
and two arrays. In both, start and end never decrease from row to row, and an empty row has start = end = the
value that keeps them so. Therefore the keys of the rows r0 .. r1 - 1 lie in [start(r0), end(r1 - 1)), and the
keys t0 .. t1 - 1 are seen by the rows from the first with end > t0 to the last with start < t1. Rows from n_q
on have start = end = n_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

UNBOUNDED = 2**30
"""A band edge so far away that no block reaches it; kernels may use 32-bit integers."""


@dataclass(frozen=True)
class RowBlock:
    """Bounds of a run of query rows: the first row has the least start and end, the last the greatest."""

    first_start: int
    first_end: int
    last_start: int
    last_end: int

    def is_visible(self, t0: int, t1: int) -> bool:
        """Whether every row sees every key t0 .. t1 - 1, so that no mask is needed."""
        return self.last_start <= t0 and t1 <= self.first_end


@dataclass(frozen=True)
class BandIntervals:
    """Row s sees the keys t with ``lo <= s - t <= hi``, for s < n_q and t < n_k."""

    lo: int
    hi: int
    n_q: int
    n_k: int

    def __post_init__(self) -> None:
        assert self.n_q >= 0 and self.n_k >= 0, f"negative size in {self}"
        assert self.lo <= self.hi + 1, f"the bounds of {self} would cross"
        assert self.lo >= -UNBOUNDED and self.hi <= UNBOUNDED, f"an edge of {self} is out of range"

    @property
    def is_empty(self) -> bool:
        """Whether no row sees any key: the block can be skipped."""
        return (
            self.lo > self.hi
            or self.lo > self.n_q - 1
            or self.hi < 1 - self.n_k
            or not (self.n_q and self.n_k)
        )

    @property
    def num_pairs(self) -> int:
        """Number of visible (query, key) pairs."""
        return self._sum_clamped(self.lo - 1) - self._sum_clamped(self.hi)

    def bounds(self, rows: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """(start, end), int32 [rows] each; ``rows`` is C_q, at least n_q."""
        row = torch.arange(rows, dtype=torch.int64, device=device)
        start = (row - self.hi).clamp_(0, self.n_k)
        end = (row - (self.lo - 1)).clamp_(0, self.n_k)
        start[self.n_q :] = self.n_k
        end[self.n_q :] = self.n_k
        return start.int(), end.int()

    def row_block(self, r0: int, r1: int) -> RowBlock:
        """Bounds of the rows r0 .. r1 - 1, which must be real rows."""
        assert 0 <= r0 < r1 <= self.n_q, f"rows {r0} to {r1} of {self.n_q}"
        return RowBlock(
            first_start=min(max(r0 - self.hi, 0), self.n_k),
            first_end=min(max(r0 - self.lo + 1, 0), self.n_k),
            last_start=min(max(r1 - 1 - self.hi, 0), self.n_k),
            last_end=min(max(r1 - self.lo, 0), self.n_k),
        )

    def _sum_clamped(self, shift: int) -> int:
        """Sum over the rows s < n_q of clamp(s - shift, 0, n_k)."""

        def triangle(n: int) -> int:
            return n * (n + 1) // 2 if n > 0 else 0

        def sum_positive(shift: int) -> int:
            return triangle(self.n_q - 1 - shift) - triangle(-shift - 1)

        return sum_positive(shift) - sum_positive(shift + self.n_k)


@dataclass(frozen=True, eq=False)
class ArrayIntervals:
    """Row s sees the keys ``start[s] <= t < end[s]``; start and end are int32 [C_q], on one device."""

    start: Tensor
    end: Tensor
    n_q: int
    n_k: int

    def __post_init__(self) -> None:
        for name, bound in (("start", self.start), ("end", self.end)):
            assert bound.dtype == torch.int32 and bound.dim() == 1, (
                f"{name} is {bound.dtype} {list(bound.shape)}"
            )
        assert len(self.start) == len(self.end) >= self.n_q >= 0 <= self.n_k, f"sizes disagree in {self}"

    @property
    def is_empty(self) -> bool:
        """Whether no row sees any key: the block can be skipped. Reads the arrays once (a device sync on a
        GPU)."""
        return self.num_pairs == 0

    @cached_property
    def num_pairs(self) -> int:
        """Number of visible (query, key) pairs. Reads the arrays once (a device sync on a GPU)."""
        return int((self.end - self.start).sum(dtype=torch.int64))

    def bounds(self, rows: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """(start, end), int32 [rows] each; ``rows`` is C_q, the length of the arrays."""
        assert rows == len(self.start), f"{rows} rows asked of {len(self.start)}"
        return self.start.to(device), self.end.to(device)

    def row_block(self, r0: int, r1: int) -> RowBlock:
        """Bounds of the rows r0 .. r1 - 1, which must be real rows."""
        assert 0 <= r0 < r1 <= self.n_q, f"rows {r0} to {r1} of {self.n_q}"
        return RowBlock(
            first_start=int(self.start[r0]),
            first_end=int(self.end[r0]),
            last_start=int(self.start[r1 - 1]),
            last_end=int(self.end[r1 - 1]),
        )


Intervals = BandIntervals | ArrayIntervals
