"""The table of a schedule: what the kernels of the deterministic backward read.

The backward gives every worker (one resident thread block) a list of tasks. A task holds one key/value tile
in registers and walks some query tiles of one head; at each it computes a part of dq and adds it to the tile
of dq in memory. Floating-point sums depend on their order, so every such step carries a turn: it is added
after exactly ``turn`` others, and a counter a (query head, query tile) holds it back until then. The table
alone fixes the order of every sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from meshattn_kernels.dash.placement import job_costs, launch_order, place, place_in_turn
from meshattn_kernels.dash.schedules import CYCLIC, LINEAR, SCHEDULES, Walks, cut_ends, split_shift
from meshattn_kernels.device import copied, on_host
from meshattn_kernels.tile_ranges import TileRanges

LOAD = 1
"""Flag of a task: a new key/value tile begins; load K and V, set dk and dv in registers to zero."""

STORE = 2
"""Flag of a task: dk and dv in registers are ready after it; store or add them."""

STEP_PADDING = 16
"""Zero entries behind the last step, because kernels read ahead."""

MAX_TILES = 1 << 15


@dataclass(frozen=True, eq=False)
class ScheduleTable:
    """Who works on what, in which order, and the turn of every addition into dq.

    All tensors are int32, contiguous and on one device.

    worker_start    [workers + 1]: worker w does the tasks worker_start[w] .. worker_start[w + 1] - 1, in
                    order.
    tasks           [num_tasks, 8]: query head b*H + h; key/value head b*H_kv + h_kv; key/value tile; first
                    step; number of steps; flags; dkv_turn; 0.
    steps           [num_steps + STEP_PADDING]: query tile | turn << 16. A task's steps are consecutive. Tasks
                    of several heads share the same steps, so the entry after a task's last is NOT the first
                    of the worker's next task; it can always be read (the padding).
    turns           [query_tiles]: number of contributions to each query tile, the same for every head. A step
                    with turn 0 stores (or adds onto the accumulator of earlier blocks), others add; the one
                    with turn turns[q] - 1 is the last.
    unseen          [num_unseen]: the query tiles without any contribution (turns 0), ascending: no step
                    visits them, so their dq must be written as zero by another way when it is first.

    Flags. The tasks between one with LOAD and the next one with STORE (both may be the same task) are
    consecutive tasks of one worker for the same key/value head and tile, and dk, dv stay in registers over
    all of them: over the query heads of a group, or over parts of a walk.

    dkv_turn of a task with STORE: -1 if it is the only one of its (key/value head, key/value tile); otherwise
    its rank among them, 0, 1, ...: it is stored (turn 0, or added onto earlier blocks) or added after exactly
    that many others. Tasks without STORE have -1. Several such tasks of one tile come from the query heads of
    a group and from walks that are cut in two.

    A key/value tile that no query tile sees has one task with LOAD | STORE and no steps, so that its dk, dv
    are written as zero when they are first.
    """

    name: str
    workers: int
    heads: int
    """Query heads of the whole batch, B * H."""
    kv_heads: int
    """Key/value heads of the whole batch, B * H_kv."""
    query_tiles: int
    kv_tiles: int
    worker_start: Tensor
    tasks: Tensor
    steps: Tensor
    turns: Tensor
    unseen: Tensor
    max_dkv_turns: int
    """Largest number of STORE tasks of one (key/value head, key/value tile): 1 means that dk, dv need no
    counters."""
    min_workers: int
    """Fewest resident workers with which these turns can be carried out; 1 for every linear schedule."""
    invariant: bool
    """Whether turns and dkv_turns are the same for every number of workers, so that all bits are."""

    @property
    def num_tasks(self) -> int:
        return len(self.tasks)

    @property
    def num_steps(self) -> int:
        """Entries of ``steps`` without the padding."""
        return len(self.steps) - STEP_PADDING

    def to(self, device: torch.device | str) -> ScheduleTable:
        """The same table on a device, in the order of its current stream."""
        worker_start, tasks, steps, turns, unseen = copied(
            torch.device(device), self.worker_start, self.tasks, self.steps, self.turns, self.unseen
        )
        return replace(self, worker_start=worker_start, tasks=tasks, steps=steps, turns=turns, unseen=unseen)


@on_host
def build_table(
    name: str,
    ranges: TileRanges,
    *,
    heads: int,
    kv_heads: int,
    workers: int,
    heads_in_flight: int = 8,
    split_heads: bool = False,
    wave: int | None = None,
    cut: tuple[int, int, int] | None = None,
) -> ScheduleTable:
    """The table of a named schedule (see ``schedules``); the same object for the same arguments.

    heads, kv_heads     B * H and B * H_kv; query head h belongs to key/value head h // (heads / kv_heads).
    workers             resident workers.
    heads_in_flight     units launched together: query heads, or key/value heads if groups stay in registers.
    split_heads         each query head of a group is a task of its own, with a part of dk, dv.
    wave                key/value tiles (pairs of them for ``symmetric_shift``) of a shift; 0 means as many as
                        there are workers, as in the paper, which gives up ``invariant``.
    cut                 which key/value tiles ``longest_first`` cuts under a full mask: the arguments of
                        ``schedules.cut_ends``.

    Raises ValueError for a name that does not exist, a mask that the schedule cannot do, or too few workers
    for a shift.
    """
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    if workers < 1:
        raise ValueError(f"a schedule needs at least one worker, not {workers}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key/value heads")
    if ranges.query_tiles > MAX_TILES or ranges.kv_tiles > MAX_TILES:
        raise ValueError(
            f"{ranges.query_tiles} query tiles and {ranges.kv_tiles} key/value tiles: a step entry has room "
            f"for {MAX_TILES} each; cut the chunk or use larger tiles"
        )
    return _build(name, ranges, heads, kv_heads, workers, heads_in_flight, split_heads, wave, cut)


@lru_cache(maxsize=256)
def _build(
    name: str,
    ranges: TileRanges,
    heads: int,
    kv_heads: int,
    workers: int,
    heads_in_flight: int,
    split_heads: bool,
    wave: int | None,
    cut: tuple[int, int, int] | None,
) -> ScheduleTable:
    walks = cut_ends(ranges, *cut) if cut else _walks(name, ranges, workers if wave == 0 else wave)
    if walks.min_workers > workers:
        raise ValueError(
            f"schedule {name!r} needs {walks.min_workers} workers, one for each job of a wave, and there are "
            f"{workers}; give a smaller wave or use one of {', '.join(LINEAR)}"
        )
    group = 1 if split_heads else heads // kv_heads
    unit, job = launch_order(walks, heads // group, heads_in_flight)
    if walks.slot is None:
        parts = group < heads // kv_heads or name in ("halves", "split_shift")
        cost = torch.tensor(job_costs(walks, group, parts))
        owner = torch.tensor(place(cost[job].tolist(), workers)[0], dtype=torch.int64)
    else:
        owner = torch.tensor(place_in_turn(len(job), workers), dtype=torch.int64)
    tasks, row_owner = _task_rows(walks, unit, job, owner, group, heads // kv_heads)
    worker_start = torch.zeros(workers + 1, dtype=torch.int64)
    worker_start[1:] = torch.cumsum(torch.bincount(row_owner, minlength=workers), 0)
    turns = walks.visits()
    return ScheduleTable(
        name=name,
        workers=workers,
        heads=heads,
        kv_heads=kv_heads,
        query_tiles=ranges.query_tiles,
        kv_tiles=ranges.kv_tiles,
        worker_start=worker_start.int(),
        tasks=tasks.int().contiguous(),
        steps=walks.entries(STEP_PADDING),
        turns=turns.int(),
        unseen=torch.nonzero(turns == 0).squeeze(1).int(),
        max_dkv_turns=max(1, int(tasks[:, 6].max()) + 1 if len(tasks) else 1),
        min_workers=walks.min_workers,
        invariant=not (name in CYCLIC and wave == 0),
    )


def _walks(name: str, ranges: TileRanges, wave: int | None) -> Walks:
    if name == "split_shift":
        return split_shift(ranges, wave) if wave else split_shift(ranges)
    if name in CYCLIC:
        return CYCLIC[name](ranges, wave) if wave else CYCLIC[name](ranges)
    return LINEAR[name](ranges)


def _task_rows(
    walks: Walks, unit: Tensor, job: Tensor, owner: Tensor, group: int, true_group: int
) -> tuple[Tensor, Tensor]:
    """Rows of ``tasks`` in the order of work of all workers, and the worker of each row."""
    jobs = int(walks.job[-1]) + 1 if len(walks.job) else 0
    per_job = torch.bincount(walks.job, minlength=jobs)
    begin = torch.cumsum(per_job, 0) - per_job
    launch = torch.repeat_interleave(torch.arange(len(job)), per_job[job])
    ends = torch.cumsum(per_job[job], 0)
    walk = begin[job[launch]] + torch.arange(len(launch)) - (ends - per_job[job])[launch]
    # Query heads of a unit: one row each. A tile that nothing sees needs only one, to write its zeros.
    launch, walk = launch.repeat_interleave(group), walk.repeat_interleave(group)
    head = unit[launch] * group + torch.arange(len(launch)) % group
    needed = (walks.length[walk] > 0) | (head % true_group == 0)
    launch, walk, head = launch[needed], walk[needed], head[needed]

    kv = walks.kv[walk]
    run = torch.zeros_like(walks.kv)  # walks of one key/value tile in a row within a job
    run[1:] = torch.cumsum((walks.kv[1:] != walks.kv[:-1]) | (walks.job[1:] != walks.job[:-1]), 0)
    order = torch.arange(len(launch))
    if group > 1 and len(launch):  # in registers: head by head within a run
        key = (launch * (int(run.max()) + 1) + run[walk]) * group + head % group
        order = torch.argsort(key, stable=True)
        launch, walk, head, kv = launch[order], walk[order], head[order], kv[order]
    same_run = (launch[1:] == launch[:-1]) & (run[walk[1:]] == run[walk[:-1]])
    load = torch.ones_like(launch, dtype=torch.bool)
    store = torch.ones_like(load)
    load[1:], store[:-1] = ~same_run, ~same_run

    dkv_turn = torch.full_like(launch, -1)
    tile = (head // true_group * (int(kv.max()) + 1 if len(kv) else 1) + kv)[store]
    by_tile = torch.argsort(tile, stable=True)
    count = torch.bincount(tile)
    rank = torch.empty_like(tile)
    rank[by_tile] = torch.arange(len(tile)) - (torch.cumsum(count, 0) - count)[tile[by_tile]]
    dkv_turn[store] = torch.where(count[tile] > 1, rank, -1)

    first_step = torch.cumsum(walks.length, 0) - walks.length
    rows = torch.stack(
        (
            head,
            head // true_group,
            kv,
            first_step[walk],
            walks.length[walk],
            load * LOAD + store * STORE,
            dkv_turn,
            torch.zeros_like(head),
        ),
        1,
    )
    row_owner = owner[launch]
    by_owner = torch.argsort(row_owner, stable=True)
    return rows[by_owner], row_owner
