"""Both forms of intervals against the rule ``lo <= s - t <= hi``, cell by cell."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from meshattn_kernels import UNBOUNDED, ArrayIntervals, BandIntervals, Intervals


def random_band(rng: random.Random) -> BandIntervals:
    lo = rng.choice([-UNBOUNDED, rng.randint(-12, 12)])
    hi = rng.choice([UNBOUNDED, rng.randint(-12, 12)])
    return BandIntervals(min(lo, hi + 1), hi, rng.randint(0, 9), rng.randint(0, 9))


def cases() -> list[tuple[BandIntervals, Intervals, int]]:
    """A band, the same or its arrays, and the rows of the chunk."""
    rng = random.Random("intervals")
    found: list[tuple[BandIntervals, Intervals, int]] = []
    for _ in range(300):
        band = random_band(rng)
        rows = max(1, band.n_q + rng.randint(0, 4))
        found.append((band, band, rows))
        found.append((band, ArrayIntervals(*band.bounds(rows), band.n_q, band.n_k), rows))
    return found


def test_every_cell() -> None:
    for band, intervals, rows in cases():
        start, end = (bound.tolist() for bound in intervals.bounds(rows))
        pairs = 0
        for s in range(rows):
            seen = [t for t in range(band.n_k) if s < band.n_q and band.lo <= s - t <= band.hi]
            assert list(range(start[s], end[s])) == seen, (intervals, rows, s)
            pairs += len(seen)
        assert intervals.num_pairs == pairs, intervals
        assert intervals.is_empty == (pairs == 0), intervals


def test_bounds_keep_their_order_and_padding_ends_at_the_last_key() -> None:
    for _, intervals, rows in cases():
        start, end = (bound.tolist() for bound in intervals.bounds(rows))
        assert len(start) == len(end) == rows
        assert all(a <= b for bound in (start, end) for a, b in pairwise(bound)), intervals
        assert all(0 <= a <= b <= intervals.n_k for a, b in zip(start, end, strict=True)), intervals
        assert all(a == b == intervals.n_k for a, b in zip(start, end, strict=True) if a >= intervals.n_k)
        assert start[intervals.n_q :] == end[intervals.n_q :] == [intervals.n_k] * (rows - intervals.n_q)


def test_row_blocks() -> None:
    for band, intervals, rows in cases():
        start, end = (bound.tolist() for bound in intervals.bounds(rows))
        for r0 in range(band.n_q):
            for r1 in range(r0 + 1, band.n_q + 1):
                block = intervals.row_block(r0, r1)
                assert (block.first_start, block.first_end) == (start[r0], end[r0])
                assert (block.last_start, block.last_end) == (start[r1 - 1], end[r1 - 1])
                for t0 in range(band.n_k):
                    for t1 in range(t0 + 1, band.n_k + 1):
                        seen = all(start[s] <= t0 and t1 <= end[s] for s in range(r0, r1))
                        assert block.is_visible(t0, t1) == seen, (intervals, r0, r1, t0, t1)


def test_a_block_of_keys_is_seen_by_one_run_of_rows() -> None:
    """The rule by which a kernel that walks the queries of a key block finds its first and last row."""
    for band, intervals, rows in cases():
        start, end = (bound.tolist() for bound in intervals.bounds(rows))
        for t0 in range(band.n_k):
            for t1 in range(t0 + 1, band.n_k + 1):
                first = next((s for s in range(rows) if end[s] > t0), rows)
                last = next((s for s in reversed(range(rows)) if start[s] < t1), -1)
                seeing = [s for s in range(rows) if max(start[s], t0) < min(end[s], t1)]
                assert all(first <= s <= last for s in seeing), intervals
                assert last < band.n_q, intervals
                assert not seeing or (seeing[0] == first and seeing[-1] == last), intervals


@pytest.mark.parametrize(
    "make",
    [
        lambda: BandIntervals(3, 1, 4, 4),
        lambda: BandIntervals(0, 1, -1, 4),
        lambda: BandIntervals(-UNBOUNDED - 1, 1, 4, 4),
        lambda: ArrayIntervals(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 3, 4),
        lambda: ArrayIntervals(torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 2, 4),
        lambda: ArrayIntervals(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), 4, 4),
        lambda: BandIntervals(0, 1, 4, 4).row_block(2, 5),
    ],
    ids=["crossed", "negative size", "out of range", "int64", "unequal", "too many rows", "padding rows"],
)
def test_invalid_intervals_cannot_be_made(make: object) -> None:
    assert callable(make)
    with pytest.raises(AssertionError):
        make()
