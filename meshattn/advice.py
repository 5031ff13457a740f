"""Which layout suits a mask: what it moves, how full its tiles are, how even the ranks are. Needs no torch.

Letters: S sequence length, P ranks, W keys of a window.

Striped chunks are even for every causal mask, and every chunk sees a part of every window: a band of W / P
keys, which is narrow for the tiles that kernels compute, and no hop is left out. Contiguous chunks see their
own window and the end of the chunk before; the tiles are full and the other hops are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import get_args

from meshattn.layouts import Layout, LayoutKind, Piece
from meshattn.plan.assignment import Assignment, Tile
from meshattn.plan.block_cost import Mask
from meshattn.plan.cost import FLOPS_PER_BYTE, CallShape, choose_tile, flops_per_pair, reached_bytes
from meshattn.plan.hops import Reach, Visibility
from meshattn.plan.schedule import Direction

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
ROWS, KEYS = 64, 128
"""A tile that kernels compute as a whole."""
NEAR = 1.02
"""Times nearer than this are as good as equal: bytes decide."""


@dataclass(frozen=True)
class LayoutFigures:
    """One layout under one mask."""

    layout: LayoutKind
    tile: Tile  # the one that auto takes
    sent_bytes: dict[Direction, int]  # of a rank, on average
    fill: float  # visible pairs of query and key, of all pairs in the tiles that hold any
    imbalance: float  # computed tiles of the busiest rank, of those of the average rank
    time: int  # nominal, in byte times: of the busiest rank, the longer of tiles and bytes, both passes

    def __str__(self) -> str:
        sent = sum(self.sent_bytes.values()) / 2**20
        return (
            f"{self.layout} (tile {self.tile}: {sent:.1f} MiB sent by a rank on average, "
            f"tiles {100 * self.fill:.0f} % full, "
            f"busiest rank {self.imbalance:.2f} times the average)"
        )


def layout_figures(
    layout: LayoutKind, seq_len: int, ranks: int, shape: CallShape, left: int | None, right: int | None
) -> LayoutFigures:
    """Figures of a layout for queries that see ``left`` keys before and ``right`` after their own; None is
    all."""
    cut = Layout(layout, seq_len, ranks, shape.rows)
    pieces = [_real_pieces(cut, chunk) for chunk in range(ranks)]
    counts = [[_count(pieces[p], pieces[q], left, right) for q in range(ranks)] for p in range(ranks)]
    visibility = Visibility(tuple(sum((row[q][0] > 0) << q for q in range(ranks)) for row in counts))
    tile = choose_tile(ranks, shape, visibility=visibility)
    assignment = Assignment(tile)
    computed = [
        sum(counts[p][q][1] for p in assignment.queries(i) for q in assignment.keys(i)) for i in range(ranks)
    ]
    visible = sum(count for row in counts for count, _ in row)
    reach = Reach(tile, visibility)
    sent = {direction: reached_bytes(direction, shape, reach)[0] // ranks for direction in DIRECTIONS}
    time = 0
    for direction in DIRECTIONS:
        pairs = max(computed) * ROWS * KEYS * shape.batch * shape.heads
        time += max(pairs * flops_per_pair(direction, shape) // FLOPS_PER_BYTE, sent[direction])
    return LayoutFigures(
        layout=layout,
        tile=tile,
        sent_bytes=sent,
        fill=visible / (sum(computed) * ROWS * KEYS),
        imbalance=max(computed) * ranks / sum(computed),
        time=time,
    )


def compare_layouts(
    seq_len: int, ranks: int, shape: CallShape, left: int | None, right: int | None
) -> tuple[LayoutFigures, ...]:
    """All layouts under one mask, the best first: the least nominal time; of those within 2 %, the fewest
    bytes; of equals, striped."""
    kinds: Sequence[LayoutKind] = get_args(LayoutKind)
    every = [layout_figures(kind, seq_len, ranks, shape, left, right) for kind in kinds]
    enough = NEAR * min(figures.time for figures in every)

    def price(figures: LayoutFigures) -> tuple[bool, int]:
        near = figures.time <= enough
        return not near, sum(figures.sent_bytes.values()) if near else figures.time

    return tuple(sorted(every, key=price))


def mask_of(cut: Layout, left: int | None, right: int | None) -> Mask:
    """How full every block is under a window, for the emulator (`meshattn.plan.timeline`)."""
    pieces = [_real_pieces(cut, chunk) for chunk in range(cut.chunks)]

    @cache
    def part(p: int, q: int) -> float:
        return _count(pieces[p], pieces[q], left, right)[0] / cut.rows**2

    return Mask(cut.chunks, part)


def priced_mask_of(cut: Layout, left: int | None, right: int | None, documents: Sequence[int] = ()) -> Mask:
    """As ``mask_of``, but by the tiles that kernels compute, which count as a whole where they hold any pair,
    beside those of a causal block and of a full one; ``documents`` are lengths of packed ones, one behind the
    other. Striped chunks that stand alike to each other count as equal, which they are but for a row.
    """
    ends = list(accumulate(documents)) or [cut.seq_len]
    pieces = [_real_pieces(cut, chunk) for chunk in range(cut.chunks)]
    clipped = [
        {begin: own for begin, end in pairwise([0, *ends]) if (own := _clipped(each, begin, end))}
        for each in pieces
    ]
    whole = -(-cut.rows // ROWS) * -(-cut.rows // KEYS)
    half = _count_band(0, None, cut.rows, cut.rows)[1]

    @cache
    def part(p: int, q: int) -> float:
        found = [
            _count(queries, clipped[q][begin], left, right)
            for begin, queries in clipped[p].items()
            if begin in clipped[q]
        ]
        pairs, tiles = sum(pairs for pairs, _ in found), sum(tiles for _, tiles in found)
        if not pairs:
            return 0.0
        if half == whole:  # chunks of one tile
            return pairs / cut.rows**2
        if tiles <= half:
            return 0.5 * tiles / half
        return min(1.0, 0.5 + 0.5 * (tiles - half) / (whole - half))

    def alike(p: int, q: int) -> float:
        bands = tuple((bound + p - q) // cut.chunks for bound in (right, left) if bound is not None)
        return part(*first.setdefault(bands, (p, q)))

    first: dict[tuple[int, ...], tuple[int, int]] = {}
    return Mask(cut.chunks, alike if cut.kind == "striped" else part)


def _clipped(pieces: Sequence[Piece], begin: int, end: int) -> tuple[Piece, ...]:
    """The rows of some pieces at positions from ``begin`` to ``end``."""
    found = []
    for piece in pieces:
        first, last = piece.count_below(begin), piece.count_below(end)
        if first < last:
            found.append(Piece(piece.offset + first * piece.stride, piece.stride, last - first))
    return tuple(found)


def _real_pieces(cut: Layout, chunk: int) -> tuple[Piece, ...]:
    """The pieces of a chunk without padding."""
    return tuple(
        Piece(piece.offset, piece.stride, piece.count_below(cut.seq_len)) for piece in cut.pieces(chunk)
    )


def _count(
    queries: Sequence[Piece], keys: Sequence[Piece], left: int | None, right: int | None
) -> tuple[int, int]:
    """Visible pairs, and tiles that hold any, of two chunks whose pieces have one stride."""
    pairs = tiles = 0
    for x in queries:
        for y in keys:
            distance = x.offset - y.offset
            lo = None if right is None else -((right + distance) // x.stride)
            hi = None if left is None else (left - distance) // x.stride
            more = _count_band(lo, hi, x.length, y.length)
            pairs, tiles = pairs + more[0], tiles + more[1]
    return pairs, tiles


@lru_cache(maxsize=4096)
def _count_band(lo: int | None, hi: int | None, n_q: int, n_k: int) -> tuple[int, int]:
    """The same for rows s and keys t with lo <= s - t <= hi."""
    if lo is not None and hi is not None and lo > hi:
        return 0, 0
    ends = n_q * n_k if lo is None else _sum_clamped(lo - 1, n_q, n_k)
    starts = 0 if hi is None else _sum_clamped(hi, n_q, n_k)
    # Row tiles from the first on, without those below which no key is left; the last may be a short one.
    last = -(-n_q // ROWS) - 1
    seen = last if hi is None else min(last, max(-(-(n_k + hi) // ROWS), 0))
    tiles = -(-n_k // KEYS) * seen if lo is None else _sum_tiles(seen, ROWS - lo, n_k, KEYS - 1)
    tiles -= 0 if hi is None else _sum_tiles(seen, -hi, n_k, 0)
    first = 0 if hi is None else min(max(last * ROWS - hi, 0), n_k)
    end = n_k if lo is None else min(max(n_q - lo, 0), n_k)
    if first < end:
        tiles += -(-end // KEYS) - first // KEYS
    return ends - starts, tiles


def _sum_tiles(rows: int, offset: int, n_k: int, up: int) -> int:
    """Sum over the row tiles i < rows of (x + up) // KEYS, where x is i * ROWS + offset, cut to 0 .. n_k."""
    begin = min(max(-(offset // ROWS), 0), rows)  # the first that is not cut to 0
    whole = min(max(-((offset - n_k) // ROWS), begin), rows)  # the first that is cut to n_k
    total = begin * (up // KEYS) + (rows - whole) * ((n_k + up) // KEYS)
    return total + _floor_sum(whole - begin, KEYS, ROWS, begin * ROWS + offset + up)


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Sum over i < n of (a * i + b) // m, for b >= 0, as Euclid divides."""
    total = 0
    while n > 0:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        n, m, a, b = top // m, a, m, top % m
    return total


def _sum_clamped(shift: int, n_q: int, n_k: int) -> int:
    """Sum over the rows s < n_q of s - shift, cut to 0 .. n_k."""

    def above(shift: int) -> int:
        return sum(n * (n + 1) // 2 * sign for n, sign in ((n_q - 1 - shift, 1), (-shift - 1, -1)) if n > 0)

    return above(shift) - above(shift + n_k)
