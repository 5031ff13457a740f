"""The choice of a schedule for a shape.

The default schedules come from the shape only and their turns can be carried out by any number of workers
(see ``schedules`` for why), so that a GPU with fewer multiprocessors gives the same bits.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise, product

from meshattn_kernels.dash.placement import PART_COST, TASK_COST, job_costs, place
from meshattn_kernels.dash.schedules import SPLIT_SHIFT_SPAN, end_parts, longest_first
from meshattn_kernels.dash.table import ScheduleTable, build_table
from meshattn_kernels.device import on_host
from meshattn_kernels.tile_ranges import TileRanges

NOMINAL_WORKERS = 132
"""The choice of a schedule counts on this many workers, whatever the number is: it decides bits."""

MAX_BEGIN, MAX_PIECES = 3, 8
"""Key/value tiles of a head that are cut under a full mask for the beginning, and pieces of one that is cut
for the end, at most."""

SUM_COST = 0.03
"""Time of a part of dk, dv of a tile in the sum over all parts, in steps."""

HANDOFF = 0.6
"""Time from one addition into a query tile to the next, in steps: measured 1.35 to 1.55 us, a step 2.3 us."""

LEAST_GAIN = 0.01
"""A full mask is cut into more tasks only if that promises this part of the time."""

CACHE_BYTES = 40_000_000
"""What the heads in flight should hold in the L2 cache: q, do (2 bytes an element) and dq (4 bytes)."""
SLACK_ROWS = 16384
"""With more rows, fewer heads are slack enough."""


@lru_cache(maxsize=1024)
@on_host
def choose_schedule(
    ranges: TileRanges, *, heads: int, kv_heads: int, head_dim: int, workers: int
) -> ScheduleTable:
    """The default table of a shape. Turns depend on all arguments but ``workers``.

    1. The query heads of a group stay in registers, unless splitting them over workers shortens the list
       schedule on the nominal number of workers: with few key/value tiles most workers would be idle, and
       under a causal mask those with shorter tiles would wait at each next head.
    2. A full mask over few heads: ``split_shift``, if the chain of turns at the start is longer than what the
       second task of each key/value tile costs.
    3. A full mask over more heads: ``longest_first`` with some tiles cut, so that workers begin one after the
       other and end together, if that is worth while.
    4. Walks that grow again while the one before goes on, as where a tile holds the end of a document and the
       beginning of the next: ``descending``, but for groups in registers. Both bounds of what sees a
       key/value tile rise with it, so in this order each walk comes to every query tile after those before
       it. By length, the first of a document waits for all of the next one to walk to the tile that they
       share: 24 % slower in 11 documents of 16k tokens.
    5. A longest task above the fair share of a worker: ``halves``.
    6. Otherwise ``longest_first``: over many heads the chain at the start is short.
    """
    split = heads > kv_heads and _split_is_faster(ranges, heads, kv_heads)
    units = heads if split else kv_heads
    seen = sum(length > 0 for length in ranges.lengths)
    name, wave, cut = "longest_first", None, None
    in_flight = heads_in_flight(head_dim, ranges.query_tiles * ranges.q_tile, uniform=ranges.is_uniform)
    if ranges.is_uniform:
        share = units * seen / NOMINAL_WORKERS  # key/value tiles of a worker
        chain = HANDOFF * min(seen, NOMINAL_WORKERS / units)
        gain = chain - max(share, 1.0) * (TASK_COST + PART_COST)
        if gain > LEAST_GAIN * max(share, 1.0) * max(ranges.lengths, default=0) * (heads / units):
            name, wave = "split_shift", max(1, min(seen, SPLIT_SHIFT_SPAN // units))
            in_flight = units
        elif not split:  # else each tile has as many parts as query heads anyway
            cut = _best_cut(ranges, units, heads // units, in_flight)
    elif units == heads and _grows_again(ranges):
        name = "descending"
        walked = ranges.pairs // seen * ranges.q_tile
        in_flight = heads_in_flight(head_dim, walked, uniform=False)
    elif max(ranges.lengths) * NOMINAL_WORKERS > units * ranges.pairs:
        name = "halves"
    return build_table(
        name,
        ranges,
        heads=heads,
        kv_heads=kv_heads,
        workers=workers,
        heads_in_flight=in_flight,
        split_heads=split,
        wave=wave,
        cut=cut,
    )


def named_schedule(
    name: str, ranges: TileRanges, *, heads: int, kv_heads: int, head_dim: int, workers: int
) -> ScheduleTable:
    """A schedule by name, for comparisons, with groups in registers. ``naive`` is launched as by
    FlashAttention-3: the heads in flight are the largest power of two that fits the L2 cache."""
    rows = ranges.query_tiles * ranges.q_tile
    in_flight = heads_in_flight(head_dim, rows, uniform=ranges.is_uniform or name == "naive")
    return build_table(
        name, ranges, heads=heads, kv_heads=kv_heads, workers=workers, heads_in_flight=in_flight
    )


def heads_in_flight(head_dim: int, rows: int, *, uniform: bool) -> int:
    """Heads worked on together, a power of two: what fits the L2 cache. Where walks differ in length, at
    least 8 at head size 128 and 32 at 64, and fewer only as their rows grow beyond 16k: less work leaves
    neighbours in turn too little slack.

    Measured under a full mask of 16k rows: 2 heads of size 128 are 2 to 3 % faster than 8, 4 of size 64 are
    4 % faster than 16. Under a causal mask 16 of size 128 are 2 % slower than 8; 32 of size 64 are faster
    than 16, by 2 % at 16k rows and 4 % at 4k. At 32k rows 4 of size 128 are as fast as 8, and 2 % faster
    beside transfers. A power of two, so that the last heads are seldom few: 8 of 64 are 3 % faster than 9.
    """
    fit = CACHE_BYTES // max(1, 8 * head_dim * rows)
    slack = 0 if uniform else (1024 if head_dim > 64 else 2048) // head_dim
    slack = slack * SLACK_ROWS // max(SLACK_ROWS, rows)
    return 1 << (max(1, fit, slack).bit_length() - 1)


def _grows_again(ranges: TileRanges) -> bool:
    """Whether a walk is longer than the one before and begins before that has ended."""
    walks = pairwise(zip(ranges.first, ranges.last, strict=True))
    return any(last - first < end - begin and begin < last for (first, last), (begin, end) in walks)


@lru_cache(maxsize=256)
def _best_cut(ranges: TileRanges, units: int, group: int, in_flight: int) -> tuple[int, int, int] | None:
    """Arguments of ``cut_ends``, if to cut tiles is worth while. Each launch goes to the nominal worker that
    is free first; the chain of turns of those that begin their whole tiles together comes on top."""
    tiles = ranges.kv_tiles
    if units * tiles <= NOMINAL_WORKERS or not all(ranges.lengths):
        return None
    length = ranges.lengths[0] * group
    whole, extra = length + TASK_COST, TASK_COST + PART_COST
    # Groups are long tasks, which hardly wait for each other: 1.6 % slower with a beginning of pieces.
    begins, ends = range(MAX_BEGIN + 1 if group == 1 else 1), range(NOMINAL_WORKERS // units + 2)
    best, cut = math.inf, None
    for begin, end, pieces in product(begins, ends, range(2, MAX_PIECES + 1)):
        if begin + end >= tiles:
            continue
        n, parts = 4 * begin, end_parts(begin, pieces)
        early = [length * (2 * j + 1) // (4 * n) + extra for j in range(n) for _ in range(units)]
        late = [-(-length * part // sum(parts)) + extra for part in parts for _ in range(units * end)]
        done, busy = divmod(units * (tiles - begin - end), NOMINAL_WORKERS)
        time = done * whole + place([*early, *[whole] * busy, *late], NOMINAL_WORKERS)[1]
        together = max(NOMINAL_WORKERS - len(early), min(units, NOMINAL_WORKERS) if begin else 0)
        time += HANDOFF * together / in_flight + SUM_COST * (len(early) + len(late))
        if not begin and not end:
            time *= 1 - LEAST_GAIN
        if time < best:
            best, cut = time, (begin, end, pieces) if begin or end else None
    return cut


def _split_is_faster(ranges: TileRanges, heads: int, kv_heads: int) -> bool:
    """Compares list schedules on the nominal workers.

    A group in registers has a drift as well: workers with shorter key/value tiles come sooner to the next
    head of the group, where they wait for the longer ones, half the difference of all lengths in the mean.
    """
    walks, group = longest_first(ranges), heads // kv_heads
    together, apart = job_costs(walks, group, False), job_costs(walks, 1, True)
    drift = (group - 1) * (max(ranges.lengths, default=0) - min(ranges.lengths, default=0)) // 2
    return (
        place([cost for cost in together for _ in range(kv_heads)], NOMINAL_WORKERS)[1] + drift
        > place([cost for cost in apart for _ in range(heads)], NOMINAL_WORKERS)[1]
    )
