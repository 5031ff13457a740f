"""Schedules of the deterministic backward as data: the table that the kernels read.

The backward gives every worker (one resident thread block) a list of tasks. A task holds one key/value tile in
registers and walks some query tiles of one head; at each it computes a part of dq and adds it to the tile of
dq in memory. Floating-point sums depend on their order, so every such step carries a turn: it is added after
exactly ``turn`` others, and a counter a (query head, query tile) holds it back until then. The table alone
fixes the order of every sum.

Source of the schedules: DASH, arXiv 2601.21824.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

LOAD = 1
"""Flag of a task: a new key/value tile begins; load K and V, set dk and dv in registers to zero."""

STORE = 2
"""Flag of a task: dk and dv in registers are ready after it; store or add them."""

STEP_PADDING = 16
"""Zero entries behind the last step, because kernels read ahead."""

TURN_SHIFT = 16
"""A step is ``query tile | turn << TURN_SHIFT``, a positive int32."""


@dataclass(frozen=True, eq=False)
class ScheduleTable:
    """Who works on what, in which order, and the turn of every addition into dq.

    All tensors are int32, contiguous and on one device.

    worker_start    [workers + 1]: worker w does the tasks worker_start[w] .. worker_start[w + 1] - 1, in order.
    tasks           [num_tasks, 8]: query head b*H + h; key/value head b*H_kv + h_kv; key/value tile; first step;
                    number of steps; flags; dkv_turn; 0.
    steps           [num_steps + STEP_PADDING]: query tile | turn << 16. A task's steps are consecutive. Tasks of
                    several heads may share the same steps, so the entry after a task's last is NOT the first of
                    the worker's next task; it is always readable (the padding).
    turns           [query_tiles]: number of contributions to each query tile, the same for every head. A step with
                    turn 0 stores (or adds onto the accumulator of earlier blocks), others add; the one with turn
                    turns[q] - 1 is the last.
    unseen          [num_unseen]: the query tiles without any contribution (turns 0), ascending: no step visits
                    them, so their dq must be written as zero by another way when it is first.

    Flags. The tasks between one with LOAD and the next one with STORE (both may be the same task) are consecutive
    tasks of one worker for the same key/value head and tile, and dk, dv stay in registers over all of them: over
    the query heads of a group, or over parts of a walk.

    dkv_turn of a task with STORE: -1 if it is the only one of its (key/value head, key/value tile); otherwise its
    rank among them, 0, 1, ...: it is stored (turn 0, or added onto earlier blocks) or added after exactly that
    many others. Tasks without STORE have -1.

    A key/value tile that no query tile sees has one task with LOAD | STORE and no steps, so that its dk, dv are
    written as zero when they are first.
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
    """Fewest resident workers with which these turns can be carried out."""
    invariant: bool
    """Whether turns and dkv_turns are the same for every number of workers, so that all bits are."""
