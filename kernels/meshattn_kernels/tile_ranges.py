"""Which query tiles see each key/value tile, from the intervals of a block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from weakref import WeakKeyDictionary

import torch

from meshattn_kernels.intervals import ArrayIntervals, BandIntervals, Intervals


@dataclass(frozen=True)
class TileRanges:
    """Key/value tile i is seen by the query tiles ``first[i] <= q < last[i]``; first = last when by none.

    One range of tiles is enough because the bounds of the rows never decrease. For the same reason first and
    last never decrease over the tiles that are seen.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    query_tiles: int
    q_tile: int = 64
    """Rows of a query tile."""

    def __post_init__(self) -> None:
        assert len(self.first) == len(self.last), f"{len(self.first)} and {len(self.last)} bounds"
        assert all(0 <= a <= b <= self.query_tiles for a, b in zip(self.first, self.last, strict=True)), (
            f"a range of {self} is no range of {self.query_tiles} query tiles"
        )

    @classmethod
    def full(cls, kv_tiles: int, query_tiles: int) -> TileRanges:
        """Every query tile sees every key/value tile."""
        return cls((0,) * kv_tiles, (query_tiles,) * kv_tiles, query_tiles)

    @classmethod
    def causal(cls, kv_tiles: int, query_tiles: int) -> TileRanges:
        """Key/value tile i is seen from query tile floor(i * query_tiles / kv_tiles) on."""
        return cls(
            tuple(i * query_tiles // max(kv_tiles, 1) for i in range(kv_tiles)),
            (query_tiles,) * kv_tiles,
            query_tiles,
        )

    @property
    def kv_tiles(self) -> int:
        return len(self.first)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of query tiles that see each key/value tile."""
        return tuple(b - a for a, b in zip(self.first, self.last, strict=True))

    @cached_property
    def pairs(self) -> int:
        """Visible pairs of tiles of one head: steps of the backward."""
        return sum(self.lengths)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all key/value tiles that are seen are seen by the same query tiles."""
        seen = {r for r in zip(self.first, self.last, strict=True) if r[0] < r[1]}
        return len(seen) <= 1

    @cached_property
    def _hash(self) -> int:
        return hash((self.first, self.last, self.query_tiles, self.q_tile))

    def __hash__(self) -> int:
        return self._hash  # tables are looked up by it on every call


_of_arrays: WeakKeyDictionary[ArrayIntervals, dict[tuple[int, ...], TileRanges]] = WeakKeyDictionary()


def visible_ranges(intervals: Intervals, rows_q: int, rows_k: int, q_tile: int, kv_tile: int) -> TileRanges:
    """The ranges of a block of ``rows_q`` by ``rows_k`` rows (padding included) cut into tiles.

    A band needs arithmetic only. Arrays are read once a tile size (a device sync on a GPU) and their ranges
    are kept as long as the intervals live.
    """
    if isinstance(intervals, BandIntervals):
        return _of_band(intervals, rows_q, rows_k, q_tile, kv_tile)
    known = _of_arrays.setdefault(intervals, {})
    key = (rows_q, rows_k, q_tile, kv_tile)
    if key not in known:
        known[key] = _read_arrays(intervals, rows_q, rows_k, q_tile, kv_tile)
    return known[key]


@lru_cache(maxsize=1024)
def _of_band(band: BandIntervals, rows_q: int, rows_k: int, q_tile: int, kv_tile: int) -> TileRanges:
    """Keys t0 .. t1 - 1 are seen by the rows s with t0 + lo <= s <= t1 - 1 + hi."""
    first, last = [], []
    for t0 in range(0, rows_k, kv_tile):
        t1 = min(t0 + kv_tile, band.n_k)
        r0 = max(0, t0 + band.lo)
        r1 = min(band.n_q, t1 + band.hi)
        seen = t0 < t1 and r0 < r1 and band.lo <= band.hi
        first.append(r0 // q_tile if seen else 0)
        last.append(-(-r1 // q_tile) if seen else 0)
    return TileRanges(tuple(first), tuple(last), -(-rows_q // q_tile), q_tile)


def _read_arrays(
    intervals: ArrayIntervals, rows_q: int, rows_k: int, q_tile: int, kv_tile: int
) -> TileRanges:
    """The rows from the first with end > t0 to the last with start < t1, but for empty ones at the sides."""
    start, end = (bound.cpu()[: intervals.n_q] for bound in intervals.bounds(rows_q))
    row = torch.nonzero(start < end).squeeze(1)
    start, end = start[row].contiguous(), end[row].contiguous()
    t0 = torch.arange(0, rows_k, kv_tile, dtype=torch.int32)
    t1 = (t0 + kv_tile).clamp_(max=intervals.n_k)
    low = torch.searchsorted(end, t0, right=True)
    high = torch.searchsorted(start, t1)
    seen = (low < high) & (t0 < t1)
    padded = torch.cat((row, row.new_zeros(1)))
    first = torch.where(seen, padded[low.clamp(max=len(row))] // q_tile, 0)
    last = torch.where(seen, padded[high - 1] // q_tile + 1, 0)
    return TileRanges(tuple(first.tolist()), tuple(last.tolist()), -(-rows_q // q_tile), q_tile)
