"""What a call needs beside tensors, made once a shape and mask: tile sizes, tables on the device, kind of
mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, pairwise
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from meshattn_kernels.dash import LOAD, STORE, ScheduleTable, choose_schedule, named_schedule
from meshattn_kernels.dash.choice import LEAST_GAIN, NOMINAL_WORKERS
from meshattn_kernels.dash.placement import NO_DELAY, Delay, place
from meshattn_kernels.device import Ready, copied, ready_on
from meshattn_kernels.intervals import ArrayIntervals, BandIntervals, Intervals
from meshattn_kernels.keeping import Tables
from meshattn_kernels.sharing import heads_of
from meshattn_kernels.tile_ranges import visible_ranges

FULL, BAND, ARRAY = 0, 1, 2
"""Kinds of mask: those of masks.py, as plain integers."""

KV_TILE = 128
CONSUMER_ROWS = 64
SHARED_BYTES, BARRIER_BYTES = 227 * 1024, 1024
"""Shared memory of a thread block, and of it more than enough for barriers."""
HEADS_IN_FLIGHT = 2, 4
"""Heads that the forward works on together, at least and at most: enough blocks for all workers, and few
enough for the L2 cache."""
CACHE_BYTES = 20_000_000
"""What the rows of k and v that a row of the heads in flight sees should hold on average: of size 128 and 16k
keys two are 1 % faster than four under a full mask, under a causal one four are 0.6 % faster than two, and at
32k keys two are 1.4 % faster than four."""
TASK_COST = 1.5
"""What a forward task costs beside its tiles, in tiles."""


@dataclass(frozen=True)
class ForwardTiling:
    """Rows and stages of the forward; ``carry_probs`` and ``together`` as in ``forward_math``. Together needs
    three stages: with two it is 26 % slower."""

    consumers: int
    stages: int
    carry_probs: bool
    together: bool = False

    @property
    def block(self) -> int:
        return self.consumers * CONSUMER_ROWS


_FORWARD = {  # (greater head tile, kind of mask): measured best
    (128, FULL): ForwardTiling(consumers=2, stages=3, carry_probs=True, together=True),
    (128, BAND): ForwardTiling(consumers=2, stages=2, carry_probs=False),
    (128, ARRAY): ForwardTiling(consumers=2, stages=2, carry_probs=False),
    (64, FULL): ForwardTiling(consumers=3, stages=3, carry_probs=True),
    (64, BAND): ForwardTiling(consumers=3, stages=3, carry_probs=True),
    (64, ARRAY): ForwardTiling(consumers=3, stages=2, carry_probs=False),
}


def has_room_for_out(tiling: ForwardTiling, d_tile: int, dv_tile: int, element: int = 4) -> bool:
    """Whether a block of out, of ``element`` bytes a number, fits into shared memory beside those tiles."""
    tiles = 2 * tiling.block * d_tile + 2 * tiling.stages * KV_TILE * (d_tile + dv_tile)
    return tiles + element * tiling.block * dv_tile + BARRIER_BYTES <= SHARED_BYTES


def sends_out(tiling: ForwardTiling, d_tile: int, dv_tile: int) -> bool:
    """Whether a finished out goes to memory by TMA, which leaves out what is beyond its rows and columns."""
    return has_room_for_out(tiling, d_tile, dv_tile, element=2)


def sends_dkv(head_dim: int, head_dim_v: int, mask: int, *, grouped: bool, parts: bool) -> bool:
    """Whether finished dk, dv go to memory by TMA. Head sizes up to 64 leave no room for them in shared
    memory, a band with groups and parts no registers."""
    return head_tile(max(head_dim, head_dim_v)) == 128 and not (mask == BAND and grouped and parts)


@dataclass(frozen=True)
class Call:
    """Sizes and device of a call; with intervals, the key of its plans."""

    device: int
    workers: int
    batch: int
    heads: int
    kv_heads: int
    rows_q: int
    rows_k: int
    head_dim: int
    head_dim_v: int
    first: bool
    """Whether the forward overwrites its accumulator: then rows that see nothing are tasks too."""
    schedule: str | None
    """Name of a backward schedule, None for the default of the shape."""
    part: tuple[int, int] = (0, 1)
    """Which of how many runs of heads are computed."""
    delay: Delay = NO_DELAY
    """Of workers of the forward."""

    @property
    def head_tile(self) -> int:
        return head_tile(max(self.head_dim, self.head_dim_v))

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // self.kv_heads

    @property
    def query_heads(self) -> range:
        """Those that are computed, of each batch."""
        mine = heads_of(self.kv_heads, self.part)
        return range(mine.start * self.group, mine.stop * self.group)


def head_tile(head_dim: int) -> int:
    """Columns of a tile: what TMA does not find in memory it reads as zero."""
    return 64 if head_dim <= 64 else 128


@dataclass(frozen=True, eq=False)
class Mask:
    """Intervals as kernel arguments: ``start`` and ``end`` on the device for ARRAY, else anything. In the
    forward the keys of each row, in the backward the rows of each key."""

    kind: int
    start: Tensor
    end: Tensor
    lo: int
    hi: int


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """None of the fields after ``empty`` is used when it is true."""

    call: Call
    empty: bool
    mask: Mask
    tiling: ForwardTiling
    workers: int
    worker_start: Tensor
    tasks: Tensor
    joins: Tensor
    """The blocks that are put together from parts: see ``join.join_parts_kernel``."""
    num_parts: int
    ready: Ready | None
    """When the tables are there."""

    @property
    def staged(self) -> bool:
        """Whether what earlier blocks left of out goes by way of shared memory."""
        d_tile, dv_tile = head_tile(self.call.head_dim), head_tile(self.call.head_dim_v)
        return not self.call.first and has_room_for_out(self.tiling, d_tile, dv_tile)

    @cached_property
    def scratch_sizes(self) -> tuple[int, int]:
        """float32 numbers of the parts of out, and of lse."""
        rows = self.num_parts * self.tiling.block
        return rows * self.call.head_dim_v, rows

    @cached_property
    def scratch_size(self) -> int:
        return sum(self.scratch_sizes)


@dataclass(frozen=True, eq=False)
class BackwardPlan:
    """See ``ForwardPlan``; ``table`` is on the device."""

    call: Call
    empty: bool
    mask: Mask
    q_tile: int
    table: ScheduleTable
    grouped: bool
    """Whether some task lacks LOAD or STORE."""
    some_unseen: bool
    """Whether some query tile gets no contribution."""
    parts_of_tiles: Tensor
    """int32 on the device, from the first key/value tile that several tasks share: how many, 0 where a tile
    has one task alone."""
    first_part_tile: int
    ready: Ready | None

    @property
    def parts(self) -> bool:
        """Whether some tiles of dk, dv are sums over tasks. These are stored, and summed by another kernel:
        to add them in turn costs waits instead. Where all tiles are shared they take as much memory as twice
        the accumulator of dq."""
        return self.table.max_dkv_turns > 1

    @cached_property
    def num_rows(self) -> int:
        """Query rows of all heads, each head filled up to whole tiles."""
        return self.table.heads * self.table.query_tiles * self.q_tile

    @cached_property
    def scratch_sizes(self) -> tuple[int, int, int, int]:
        """4-byte elements of the initial rows, the counters, and the parts of dk and of dv; each begins at a
        multiple of 16 bytes."""
        table = self.table
        part_rows = table.max_dkv_turns * table.kv_heads * len(self.parts_of_tiles) * KV_TILE * self.parts
        counters = -(-self.num_counters // 4) * 4
        return 2 * self.num_rows, counters, part_rows * self.call.head_dim, part_rows * self.call.head_dim_v

    @cached_property
    def scratch_size(self) -> int:
        return sum(self.scratch_sizes)

    @cached_property
    def num_counters(self) -> int:
        """One a tile of dq."""
        return self.table.heads * self.table.query_tiles


Plan = TypeVar("Plan", ForwardPlan, BackwardPlan)
_of_bands: Tables[Any] = Tables(2048)
_of_arrays: WeakKeyDictionary[ArrayIntervals, dict[Any, Any]] = WeakKeyDictionary()
_numbers = count()


def number_of(arrays: ArrayIntervals) -> int:
    """A number of these arrays and of no others, as long as the process lives."""
    number: int = _of_arrays.setdefault(arrays, {}).setdefault("number", next(_numbers))
    return number


def forward_plan(intervals: Intervals, call: Call) -> ForwardPlan:
    """Kept by value for bands, as long as the intervals live for arrays."""
    return _of(_make_forward, intervals, call)


def backward_plan(intervals: Intervals, call: Call) -> BackwardPlan:
    """Kept as those of the forward."""
    return _of(_make_backward, intervals, call)


def _of(make: Callable[[Intervals, Call], Plan], intervals: Intervals, call: Call) -> Plan:
    plan: Plan
    if isinstance(intervals, BandIntervals):
        plan = _of_bands.get((make, intervals, call), lambda: make(intervals, call))
        return plan
    known = _of_arrays.setdefault(intervals, {})
    if (make, call) not in known:
        known[make, call] = make(intervals, call)
    plan = known[make, call]
    return plan


def _mask(intervals: Intervals, device: torch.device, *, of_keys: bool) -> Mask:
    if isinstance(intervals, ArrayIntervals):
        start, end = (bound.contiguous() for bound in copied(device, intervals.start, intervals.end))
        if of_keys:
            key = torch.arange(intervals.n_k, dtype=torch.int32, device=device)
            bounds = (end[: intervals.n_q], start[: intervals.n_q])
            start, end = (torch.searchsorted(bound, key, right=True, out_int32=True) for bound in bounds)
        return Mask(ARRAY, start, end, 0, 0)
    unused = torch.zeros(1, dtype=torch.int32, device=device)
    all_visible = intervals.n_q > 0 and intervals.row_block(0, intervals.n_q).is_visible(0, intervals.n_k)
    kind = FULL if all_visible and intervals.n_k % KV_TILE == 0 else BAND
    return Mask(kind, unused, unused, intervals.lo, intervals.hi)


def _make_forward(intervals: Intervals, call: Call) -> ForwardPlan:
    device = torch.device("cuda", call.device)
    mask = _mask(intervals, device, of_keys=False)
    tiling = _FORWARD[call.head_tile, mask.kind]
    starts, tasks, joins = forward_tasks(intervals, call, tiling.block)
    tables = [torch.tensor(rows, dtype=torch.int32, device="cpu") for rows in (starts, tasks, joins)]
    worker_start, task_rows, join_rows = copied(device, *tables)
    return ForwardPlan(
        call=call,
        empty=intervals.is_empty,
        mask=mask,
        tiling=tiling,
        workers=len(starts) - 1,
        worker_start=worker_start,
        tasks=task_rows.reshape(-1, 8),
        joins=join_rows.reshape(-1, 8),
        num_parts=sum(join[4] for join in joins),
        ready=ready_on(device),
    )


Rows8 = list[list[int]]
"""Rows of a table of eight integers."""


def forward_tasks(intervals: Intervals, call: Call, block: int) -> tuple[list[int], Rows8, Rows8]:
    """Bounds of each worker's tasks, the tasks, and the blocks to be joined.

    A task: batch, query head, key/value head, query block, first tile of keys, number of tiles, 0 or number
    of its part, 0. Longest first within a set of heads, to the worker that is free first; no result depends
    on who does a task. ``first`` calls have a task for every row, others only where a key is seen."""
    ranges = []
    for number, (low, high) in enumerate(_key_ranges(intervals, call.rows_q, block)):
        tiles = -(-high // KV_TILE) - low // KV_TILE if low < high else 0
        if tiles or call.first:
            ranges.append((number, low // KV_TILE if tiles else 0, max(tiles, 1)))
    ranges.sort(key=lambda entry: -entry[2])
    all_heads = [(batch, head) for batch in range(call.batch) for head in call.query_heads]
    uniform = len({entry[1:] for entry in ranges}) == 1
    seen = sum(entry[2] for entry in ranges) * KV_TILE // max(1, len(ranges))
    in_flight = _heads_in_flight(call, seen)
    tasks = [
        [batch, head, head // call.group, number, first, tiles, 0, 0]
        for begin in range(0, len(all_heads), in_flight)
        for number, first, tiles in ranges
        for batch, head in all_heads[begin : begin + in_flight]
    ]
    joins: Rows8 = []
    if call.part == (0, 1) and uniform:
        tasks, joins = _last_ones_cut(tasks)
    work: list[Rows8] = [[] for _ in range(call.workers)]
    owners, _ = place([task[5] + TASK_COST for task in tasks], call.workers, call.delay)
    for task, worker in zip(tasks, owners, strict=True):
        work[worker].append(task)
    starts = [0]
    for mine in work:
        starts.append(starts[-1] + len(mine))
    return starts, [task for mine in work for task in mine], joins


def _heads_in_flight(call: Call, seen: int) -> int:
    """``seen`` keys by a row, on average."""
    fewest, most = HEADS_IN_FLIGHT
    key_head = 2 * seen * (call.head_dim + call.head_dim_v)
    return max(fewest, min(most, CACHE_BYTES // max(1, key_head) * call.group))


def _last_ones_cut(tasks: Rows8) -> tuple[Rows8, Rows8]:
    """Tasks that see the same tiles, and joins. On the nominal number of workers 15.5 tasks for each would
    take the time of 16, so those of the last round are one line of tiles, of which every worker gets an equal
    run, if that is worth while."""
    rounds, left = divmod(len(tasks), NOMINAL_WORKERS)
    first, tiles = tasks[0][4:6]
    share = -(-left * tiles // NOMINAL_WORKERS)
    gain = tiles - share - 2 * TASK_COST  # a run has the end of one task and the beginning of another
    if not rounds or not left or gain < LEAST_GAIN * (rounds + 1) * (tiles + TASK_COST):
        return tasks, []
    parts: Rows8 = []
    joins: Rows8 = []
    for number, task in enumerate(tasks[-left:]):
        begin, end = number * tiles, (number + 1) * tiles
        cuts = [begin, *range(-(-(begin + 1) // share) * share, end, share), end]
        joins.append([task[0], task[1], task[3], len(parts), len(cuts) - 1, 0, 0, 0])
        for low, high in pairwise(cuts):
            parts.append([*task[:4], first + low - begin, high - low, len(parts) + 1, 0])
    parts.sort(key=lambda part: -part[5])
    return tasks[:-left] + parts, joins


def _key_ranges(intervals: Intervals, rows: int, block: int) -> list[tuple[int, int]]:
    """For each block of query rows, a range of keys that holds all that these rows see."""
    if isinstance(intervals, ArrayIntervals):
        start, end = intervals.start.tolist(), intervals.end.tolist()
    ranges = []
    for r0 in range(0, rows, block):
        r1 = min(r0 + block, intervals.n_q)
        if r0 >= r1:
            ranges.append((0, 0))
        elif isinstance(intervals, ArrayIntervals):
            ranges.append((start[r0], end[r1 - 1]))
        else:
            bounds = intervals.row_block(r0, r1)
            ranges.append((bounds.first_start, bounds.last_end))
    return ranges


def _make_backward(intervals: Intervals, call: Call) -> BackwardPlan:
    device = torch.device("cuda", call.device)
    mask = _mask(intervals, device, of_keys=True)
    q_tile = 64 if call.head_tile == 128 else 128
    ranges = visible_ranges(intervals, call.rows_q, call.rows_k, q_tile, KV_TILE)
    heads, kv_heads = call.batch * len(call.query_heads), call.batch * len(call.query_heads) // call.group
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": call.head_tile, "workers": call.workers}
    if call.schedule is None:
        table = choose_schedule(ranges, **sizes)
    else:
        table = named_schedule(call.schedule, ranges, **sizes)
    if call.part != (0, 1):
        if table.max_dkv_turns > 1:  # parts of a tile are summed for all heads
            table = named_schedule("longest_first", ranges, **sizes)
        table = _among_all_heads(table, call)
    both = LOAD | STORE
    shared = table.tasks[table.tasks[:, 6] >= 0]
    one_head = shared[shared[:, 1] == shared[0, 1], 2] if len(shared) else shared[:, 2]
    first_part_tile = int(one_head.min()) if len(shared) else 0
    (parts_of_tiles,) = copied(device, torch.bincount(one_head.long() - first_part_tile).int())
    return BackwardPlan(
        call=call,
        empty=intervals.is_empty,
        mask=mask,
        q_tile=q_tile,
        table=table.to(device),
        grouped=bool((table.tasks[:, 5] & both != both).any()),
        some_unseen=len(table.unseen) > 0,
        parts_of_tiles=parts_of_tiles,
        first_part_tile=first_part_tile,
        ready=ready_on(device),
    )


def _among_all_heads(table: ScheduleTable, call: Call) -> ScheduleTable:
    """The table of a part of the heads, with the numbers that these have among all."""
    tasks, first = table.tasks.clone(), call.query_heads.start
    for column, heads, start in ((0, call.heads, first), (1, call.kv_heads, first // call.group)):
        mine = len(call.query_heads) if column == 0 else len(call.query_heads) // call.group
        batch, head = tasks[:, column] // mine, tasks[:, column] % mine
        tasks[:, column] = batch * heads + start + head
    return replace(table, tasks=tasks, heads=call.batch * call.heads, kv_heads=call.batch * call.kv_heads)
