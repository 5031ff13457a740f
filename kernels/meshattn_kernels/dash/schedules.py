"""The orders of the backward: for one head, which walks are made over the query tiles, and the turns.

A walk is one task of the table for one head: a key/value tile and a run of query tiles, taken in one
direction from a start, once round. Walks of the same job run on one worker, one after the other. All heads
have the same walks, so that turns depend on tile indices only.

Two kinds of order differ in what they ask of the grid:

* Linear. The jobs of a head stand in one order and every query tile is visited in this order: the turn is
  the rank among the jobs that visit the tile. If each worker does its jobs in launch order, every wait points
  to a job launched earlier, and any number of workers, even one, finishes: all that the earliest unfinished
  job waits for is done. The converse holds too: on one worker a job ends before the next begins, so of two
  jobs one is first at all tiles. One worker can carry out a turn table exactly if it is linear.
* Cyclic. In a shift each job is the first at its own start and comes later elsewhere, so any two jobs of a
  wave wait for each other: all jobs of a wave must be resident, and fewer workers deadlock for certain.

A cyclic walk cut where it wraps round becomes linear, at the cost of adding dk and dv twice
(``split_shift``): the parts up to the end in order of rising length, then the parts from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from meshattn_kernels.tile_ranges import TileRanges

TURN_SHIFT = 16
"""A step is ``query tile | turn << TURN_SHIFT``, a positive int32."""

SHIFT_WAVE = 32
"""Key/value tiles of a head that a shift turns round together. Fixed, so that turns do not depend on the
workers; small enough that the quarter of a large GPU can hold a wave."""

SPLIT_SHIFT_SPAN = 128
"""Key/value tiles of all heads in flight of a split shift: the largest power of two within a GPU of 132
multiprocessors."""


@dataclass(frozen=True, eq=False)
class Walks:
    """All walks of one head, in launch order; int64 tensors [num_walks].

    Step t of a walk is at query tile first + (start - first + direction * t) mod length. ``job`` and ``wave``
    number jobs and waves, never decreasing. ``slot`` is the ideal time of step 0; None for a linear order.
    Jobs before ``early`` are launched before the others of all heads, those from ``late`` on behind them.
    """

    kv: Tensor
    first: Tensor
    length: Tensor
    start: Tensor
    direction: Tensor
    job: Tensor
    wave: Tensor
    slot: Tensor | None
    query_tiles: int
    early: int = 0
    late: int | None = None

    @property
    def min_workers(self) -> int:
        """Fewest workers that can carry out these turns: one, or as many as the largest wave has jobs."""
        if self.slot is None or not len(self.job):
            return 1
        first_of_job = torch.ones_like(self.job, dtype=torch.bool)
        first_of_job[1:] = self.job[1:] != self.job[:-1]
        return int(torch.bincount(self.wave[first_of_job]).max())

    def entries(self, padding: int = 0) -> Tensor:
        """Query tile | turn << TURN_SHIFT of every step, walk after walk, then zeros; int32."""
        if self.slot is None:
            return self._in_launch_order(padding)
        walk = torch.repeat_interleave(torch.arange(len(self.kv)), self.length)
        begin = torch.cumsum(self.length, 0) - self.length
        t = torch.arange(len(walk)) - begin[walk]
        first = self.first[walk]
        query = first + (self.start[walk] - first + self.direction[walk] * t) % self.length[walk]
        key = (self.slot[walk] + t) * len(self.kv) + walk
        order = torch.argsort(query * (int(key.max()) + 1 if len(key) else 1) + key)
        visits = torch.bincount(query, minlength=self.query_tiles)
        turn = torch.empty_like(query)
        turn[order] = torch.arange(len(walk)) - (torch.cumsum(visits, 0) - visits)[query[order]]
        return torch.cat((query | turn << TURN_SHIFT, query.new_zeros(padding))).int()

    def _in_launch_order(self, padding: int) -> Tensor:
        """Where each walk comes after all before it: no arithmetic on single steps, of which there may be
        many millions."""
        columns = (self.first, self.length, self.start, self.direction)
        entries = torch.zeros(int(self.length.sum()) + padding, dtype=torch.int32)
        due = torch.arange(self.query_tiles, dtype=torch.int32)  # the entry of the next visit to each tile
        begin = 0
        for first, length, start, direction in zip(*(column.tolist() for column in columns), strict=True):
            if length:
                seen, walk = due[first : first + length], entries[begin : begin + length]
                ahead = (first - start if direction > 0 else first - start - 1) % length
                rolled = seen.roll(ahead) if ahead else seen
                walk.copy_(rolled if direction > 0 else rolled.flip(0))
                seen += 1 << TURN_SHIFT
                begin += length
        return entries

    def visits(self) -> Tensor:
        """Number of walks that come to each query tile, int64 [query_tiles]."""
        begun, ended = (
            torch.bincount(bound, minlength=self.query_tiles + 1)
            for bound in (self.first, self.first + self.length)
        )
        return torch.cumsum(begun - ended, 0)[: self.query_tiles]


Walk = tuple[int, int, int, int, int]
"""(key/value tile, first, last, start, direction)"""


def _linear(walks: Iterable[Walk], query_tiles: int) -> Walks:
    """Each walk a job and a wave of its own."""
    columns = torch.tensor(list(walks), dtype=torch.int64).reshape(-1, 5)
    kv, first, last, start, direction = columns.unbind(1)
    job = torch.arange(len(kv))
    return Walks(kv, first, last - first, start, direction, job, job.clone(), None, query_tiles)


def _plain(ranges: TileRanges, order: Iterable[int], direction: int) -> Walks:
    """Whole ranges, upwards from the first query tile or downwards from the last."""
    first, last = ranges.first, ranges.last
    return _linear(
        ((i, first[i], last[i], first[i] if direction > 0 else last[i] - 1, direction) for i in order),
        ranges.query_tiles,
    )


def naive(ranges: TileRanges) -> Walks:
    """Key/value tiles and query tiles ascending: deterministic FlashAttention-3 before September 2025."""
    return _plain(ranges, range(ranges.kv_tiles), 1)


def descending(ranges: TileRanges) -> Walks:
    """Key/value tiles ascending, query tiles descending (DASH): under a causal mask a worker that comes to
    the next head begins at tiles that others have left."""
    return _plain(ranges, range(ranges.kv_tiles), -1)


def shortest_first(ranges: TileRanges) -> Walks:
    """Shortest walk first, query tiles ascending: what FlashAttention-3 and 4 do since. Under a causal mask
    each walk begins at a tile where it is the first, so none waits at its start; but long walks come last."""
    lengths = ranges.lengths
    return _plain(ranges, sorted(range(ranges.kv_tiles), key=lambda i: (lengths[i], -i)), 1)


def longest_first(ranges: TileRanges) -> Walks:
    """The list scheduler for any mask: longest walk first, so that the workers end together, query tiles
    descending, so that all walks run the same way and delays do not build up.

    Equal to ``descending`` where lengths never increase, as under full and causal masks. Under a window each
    walk begins at a tile that the earlier ones do not see.
    """
    lengths = ranges.lengths
    return _plain(ranges, sorted(range(ranges.kv_tiles), key=lambda i: (-lengths[i], i)), -1)


def cut_ends(ranges: TileRanges, begin: int, end: int, pieces: int) -> Walks:
    """``longest_first`` under a full mask with the last key/value tiles of every head in pieces: those of
    ``begin`` tiles are launched before all whole tiles, those of ``end`` tiles behind, ``pieces`` of each.

    Workers that begin together stay together: each comes to a query tile just when the one before it has
    left, and waits whenever that is late. Behind pieces of many lengths they come one after the other. The
    pieces at the end fill up what is left: 15.5 tasks a worker take the time of 16, unless the last ones are
    short. If workers come to them one after the other, they are of all heads, the longest first, and what
    visits the same query tiles together: few other tasks keep these in the cache by then. Each piece has a
    part of dk, dv."""
    tiles, n = ranges.kv_tiles, 4 * begin
    whole = [
        (i, ranges.first[i], ranges.last[i], ranges.last[i] - 1, -1)
        for i in range(tiles - begin - end)
        if ranges.lengths[i]
    ]
    early = []
    for number in range(begin):  # lengths 1, 3, 5, .. in proportion, over all tiles
        odd = [2 * j + 1 for j in (n - 1 - 2 * number, n - 2 - 2 * number, 2 * number + 1, 2 * number)]
        early += _pieces(ranges, tiles - begin - end + number, odd)
    early.sort(key=lambda walk: walk[3])  # all at once: who starts lower comes first wherever two meet
    of_tiles = [_pieces(ranges, i, end_parts(begin, pieces)) for i in range(tiles - end, tiles)]
    late = [piece for same in zip(*of_tiles, strict=True) for piece in same]
    walks = _linear(early + whole + late, ranges.query_tiles)
    first_late = len(early) + len(whole)
    if begin:
        walks.wave[first_late:] = first_late + torch.arange(len(late)) // max(end, 1)
    return replace(walks, early=len(early), late=first_late)


def end_parts(begin: int, pieces: int) -> list[int]:
    """Lengths, in proportion, of the pieces of a key/value tile that ``cut_ends`` cuts for the end."""
    return [*range(pieces, 0, -1)] if begin else [1] * pieces


def _pieces(ranges: TileRanges, i: int, lengths: Sequence[int]) -> list[Walk]:
    """A key/value tile cut from the last query tile downwards into walks of these lengths, in proportion."""
    last, length = ranges.last[i], ranges.lengths[i]
    cuts = [last - length * done // sum(lengths) for done in accumulate(lengths, initial=0)]
    return [(i, low, high, high - 1, -1) for high, low in pairwise(cuts) if low < high]


def halves(ranges: TileRanges) -> Walks:
    """``longest_first`` on each half of the query tiles, interleaved: tasks of half the length, and two
    chains of turns of half the workers each. For one or two heads under a causal mask, where the longest task
    is longer than a fair share of the work."""
    middle = ranges.query_tiles // 2
    walks = []
    for i in sorted(range(ranges.kv_tiles), key=lambda i: (-ranges.lengths[i], i)):
        first, last = ranges.first[i], ranges.last[i]
        cut = min(max(middle, first), last)
        parts = [(first, cut), (cut, last)] if first < cut < last else [(first, last)]
        parts.sort(key=lambda part: part[1] - part[0])  # the part that ends first adds dk, dv first
        walks += [(i, a, b, b - 1, -1) for a, b in parts]
    return _linear(walks, ranges.query_tiles)


def split_shift(ranges: TileRanges, wave: int = SPLIT_SHIFT_SPAN) -> Walks:
    """The shift as a linear order: each walk is cut into two jobs where it would wrap round.

    The upper parts are launched from the shortest to the longest, then the lower parts from the longest to
    the shortest. A worker that ends an upper part finds the lower part that fits behind it, so with ``wave``
    workers the time line is that of the shift. dk and dv are added in two turns.
    """
    seen, unseen = _split_seen(ranges)
    walks: list[Walk] = []
    for begin in range(0, len(seen), wave):
        tiles = seen[begin : begin + wave]
        parts = []
        for rank, i in enumerate(tiles):
            first, last = ranges.first[i], ranges.last[i]
            parts.append((i, first, first + (last - first) * rank // len(tiles), last))
        walks += [(i, cut, last, cut, 1) for i, _, cut, last in reversed(parts)]
        walks += [(i, first, cut, first, 1) for i, first, cut, _ in reversed(parts) if first < cut]
    walks += [(i, ranges.first[i], ranges.first[i], 0, 1) for i in unseen]
    return _linear(walks, ranges.query_tiles)


def shift(ranges: TileRanges, wave: int = SHIFT_WAVE) -> Walks:
    """Each key/value tile of a wave begins at a query tile of its own and goes once round (DASH): no two are
    at the same query tile at the same time. Needs a full mask and ``wave`` resident workers."""
    if not ranges.is_uniform:
        raise ValueError(
            "a shift needs every key/value tile to be seen by the same query tiles; use 'longest_first'"
        )
    seen, unseen = _split_seen(ranges)
    columns: list[tuple[int, ...]] = []
    for number, i in enumerate(seen):
        of_wave = min(wave, len(seen) - number // wave * wave)
        first, length = ranges.first[i], ranges.lengths[i]
        start = (
            first + number % wave * length // of_wave if length >= of_wave else first + number % wave % length
        )
        columns.append((i, first, length, start, 1, number, number // wave, number // wave * length))
    return _cyclic(columns, unseen, ranges)


def symmetric_shift(ranges: TileRanges, wave: int = SHIFT_WAVE) -> Walks:
    """Pairs of a long and a short key/value tile on one worker, so that all workers have the same (DASH).
    Causal masks only. The long tile goes round the rectangle that all long tiles of the wave see, then up its
    triangle; the short one goes down. ``wave`` counts pairs, all of which must be resident."""
    seen, unseen = _split_seen(ranges)
    n, end = len(seen), ranges.query_tiles
    if any(ranges.last[i] != end for i in seen) or any(
        ranges.first[a] > ranges.first[b] for a, b in pairwise(seen)
    ):
        raise ValueError("a symmetric shift needs a causal mask; use 'longest_first'")
    span = 4 * (end + 1)
    columns: list[tuple[int, ...]] = []
    pairs = (n + 1) // 2
    for pair in range(pairs):
        number = pair // wave
        long, short = seen[pair], seen[n - 1 - pair]
        rect = ranges.first[seen[min(number * wave + wave, pairs) - 1]]
        round_, first, slot = end - rect, ranges.first[long], number * span
        start = rect + pair % wave % round_
        columns.append((long, rect, round_, start, 1, pair, number, slot))
        if first < rect:
            columns.append((long, first, rect - first, first, 1, pair, number, slot + round_))
        if short != long:
            length = end - ranges.first[short]
            # Behind every visit of a long tile, in the order in which the long tiles end.
            slot += span // 2 + (end - first)
            columns.append((short, ranges.first[short], length, end - 1, -1, pair, number, slot))
    return _cyclic(columns, unseen, ranges)


def _split_seen(ranges: TileRanges) -> tuple[list[int], list[int]]:
    seen = [i for i, length in enumerate(ranges.lengths) if length]
    return seen, [i for i, length in enumerate(ranges.lengths) if not length]


def _cyclic(columns: list[tuple[int, ...]], unseen: list[int], ranges: TileRanges) -> Walks:
    jobs, waves = (columns[-1][5] + 1, columns[-1][6] + 1) if columns else (0, 0)
    rows = columns + [(i, 0, 0, 0, 1, jobs + n, waves + n, 0) for n, i in enumerate(unseen)]
    kv, first, length, start, direction, job, wave, slot = (
        torch.tensor(rows, dtype=torch.int64).reshape(-1, 8).unbind(1)
    )
    return Walks(kv, first, length, start, direction, job, wave, slot, ranges.query_tiles)


LINEAR = {
    "naive": naive,
    "descending": descending,
    "shortest_first": shortest_first,
    "longest_first": longest_first,
    "halves": halves,
    "split_shift": split_shift,
}
CYCLIC = {"shift": shift, "symmetric_shift": symmetric_shift}
SCHEDULES = (*LINEAR, *CYCLIC)
"""Names of all schedules."""
