"""The greedy order of transfers and blocks: a simulation that decides whenever something is idle.

All ranks do the same at the same time, so one rank is simulated, and what arrives is what this rank sends.
The rules:

Channel, inward: the transfer that unlocks most blocks per unit of its cost; a tie goes to KV, since no row is
complete
    without all KV.
Channel, outward: goes before an inward one while the ready blocks last as long as it takes (else compute
starves) and,
    with a channel per axis, if the delay of the other axis, whose lines wait for the inward chunks of this
    one, is hidden by what remains anyway. Of two outward transfers, the one of the axis with more time left
    to send.
Compute, merges: at once, since the next outward hop waits for them.
Compute, blocks: those of the next line to leave, a row or, backward, a column. Inside a line the interior
    comes first. Row #0 and, backward, column #0 never leave, so they fill gaps, and block (0, 0) is last.

Three questions have no answer that is best everywhere, so the orders of all answers are simulated and the
shortest is taken. Like the second half of the outward rule they are there for the time bounds alone:

Goal: the line with more transfer time per block that it misses (the profit again), or the line of the axis
    that needs longer until all its lines have left: better where the axes are unequal and times balanced.
Patience: a filler block may still run when the chunk arrives that a line waits for. Staying idle instead
    pays where blocks are long and few, at small P.
Cut: block (0, 0) in two, to fill the gaps at the start and at the end, where its costs allow it at all.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from .assignment import Axis, Tile
from .bound import lower_bound
from .makespan import channel_of
from .schedule import AXIS, INWARD, Channels, Costs, Direction, Payload, Schedule, Slots, payloads
from .steps import Event, cut

AXES: tuple[Axis, Axis] = ("row", "col")
OTHER: dict[Axis, Axis] = {"row": "col", "col": "row"}


@dataclass
class _Line:
    """Progress along one axis: its inward chunks, its lines and, where lines are reduced, their way out."""

    axis: Axis
    size: int
    inward: Payload
    inward_cost: int
    outward: Payload | None
    outward_cost: int
    pool: int  # chunk slots beside the own one
    left: list[int]  # blocks still to finish, per line
    started: int = 0  # inward transfers started, arrived
    arrived: int = 0
    sent: int = 0  # outward transfers started, complete, merged at the receiver
    received: int = 0
    merged: int = 0
    first_open: int = 1  # no line before it that leaves misses anything
    begun: list[int] = field(default_factory=list)  # per line: its blocks 1 .. n-1 were all started

    def usable(self) -> int:
        """Lines #0 .. #n-1 that may be computed: chunk here, accumulator slot free."""
        here = 1 + self.arrived
        if self.outward is not None and self.pool < self.size - 1:
            return min(here, 1 + self.pool + self.received)
        return here

    def can_receive(self) -> bool:
        """The next chunk can be sent on to here and its slot is free: old line done, old chunk passed on."""
        k = self.started + 1
        if k >= self.size or self.arrived < self.started:
            return False
        old = k - self.pool
        return old <= 0 or (self.left[old] == 0 and self.arrived > old)

    def can_send(self) -> bool:
        """The next line to leave is complete: all blocks, and what the right neighbour sent is merged in."""
        k = self.sent + 1
        return self.outward is not None and k < self.size and self.left[k] == 0 and self.merged == k - 1

    def can_merge(self) -> bool:
        return self.merged < self.received and self.left[(self.merged + 2) % self.size] == 0

    def next_open(self) -> int:
        """The next incomplete line to leave; ``size`` if all are complete."""
        while self.first_open < self.size and not self.left[self.first_open]:
            self.first_open += 1
        return self.first_open

    def next_misses(self) -> int:
        """Blocks that the next incomplete line to leave still misses; 0 if all are complete."""
        k = self.next_open()
        return self.left[k] if k < self.size else 0

    def inward_time(self) -> int:
        return (self.size - 1 - self.started) * self.inward_cost

    def outward_time(self) -> int:
        return (self.size - 1 - self.sent) * self.outward_cost


class _Simulation:
    """One pass over the time model. ``order`` and ``now`` (the makespan) are the result of ``run``."""

    def __init__(
        self,
        direction: Direction,
        tile: Tile,
        costs: Costs,
        channels: Channels,
        *,
        by_axis: bool,
        patient: bool,
        own_parts: int = 1,
    ) -> None:
        self.costs = costs
        self.channels: Channels = channels
        self.by_axis = by_axis
        self.patient = patient
        self.own_parts = own_parts  # of block (0, 0)
        self.lines = {axis: _new_line(axis, direction, tile, costs) for axis in AXES}
        self.reduced = [line for line in self.lines.values() if line.outward is not None]
        self.channel_lines: dict[str, list[_Line]] = {}
        for axis in AXES:
            self.channel_lines.setdefault(channel_of(axis, channels), []).append(self.lines[axis])
        self.busy = dict.fromkeys(self.channel_lines, False)
        self.computing = False
        self.todo = [[1] * tile.b for _ in range(tile.a)]  # parts
        self.todo[0][0] = own_parts
        for line in self.lines.values():
            line.left[0] += own_parts - 1
        self.edge_row, self.edge_col = 1, 1  # blocks of column #0 and of row #0 before these are begun
        self.num_todo = tile.ranks + own_parts - 1
        self.num_blocks = tile.ranks
        self.now = 0
        self.events: list[tuple[int, int, Event]] = []  # (end, tie breaker, what ends)
        self.order: list[Event] = []

    def run(self) -> _Simulation:
        while True:
            while self._decide():
                pass
            if not self.events:
                break
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                self._settle(heapq.heappop(self.events)[2])
        assert not self.num_todo, "no event left, but blocks to do"
        assert all(line.arrived == line.size - 1 for line in self.lines.values()), "a chunk never arrived"
        assert all(line.merged == line.size - 1 for line in self.reduced), "a partial was never merged"
        return self

    def _start(self, event: Event, cost: int) -> None:
        self.order.append(event)
        heapq.heappush(self.events, (self.now + cost, len(self.order), event))

    def _settle(self, event: Event) -> None:
        if event.payload is None:
            self.computing = False
            self.lines["row"].left[event.row] -= 1
            self.lines["col"].left[event.col] -= 1
            return
        line = self.lines[AXIS[event.payload]]
        if event.kind == "merge":
            self.computing = False
            line.merged += 1
            return
        self.busy[channel_of(line.axis, self.channels)] = False
        if event.payload in INWARD:
            line.arrived += 1
        else:
            line.received += 1

    def _decide(self) -> bool:
        """Start one thing, if something idle has anything to do."""
        if not self.computing:
            for line in self.reduced:
                if line.can_merge():
                    self.computing = True
                    self._start(Event(self.now, "merge", line.outward, line.merged + 1), self.costs.merge)
                    return True
        for channel, busy in self.busy.items():
            if not busy and self._start_transfer(channel):
                self.busy[channel] = True
                return True
        return not self.computing and self._start_block()

    # Channels

    def _start_transfer(self, channel: str) -> bool:
        inward = [line for line in self.channel_lines[channel] if line.can_receive()]
        outward = [line for line in self.channel_lines[channel] if line.can_send()]
        if outward:
            line = max(outward, key=lambda line: (line.outward_time(), line.axis == "col"))
            if not inward or self._may_send_first(line):
                line.sent += 1
                self._start(Event(self.now, "transfer", line.outward, line.sent), line.outward_cost)
                return True
        if inward:
            line = self._most_profit(inward)
            line.started += 1
            self._start(Event(self.now, "transfer", line.inward, line.started), line.inward_cost)
            return True
        return False

    def _most_profit(self, candidates: list[_Line]) -> _Line:
        """The axis whose next chunk unlocks most blocks per cost, with chunks of the other axis under way."""
        if len(candidates) == 1:
            return candidates[0]
        row, col = self.lines["row"], self.lines["col"]
        return col if (1 + row.started) * row.inward_cost >= (1 + col.started) * col.inward_cost else row

    def _may_send_first(self, line: _Line) -> bool:
        ready = self.lines["row"].usable() * self.lines["col"].usable() - (self.num_blocks - self.num_todo)
        if ready * self.costs.block < line.outward_cost:
            return False
        if self.channels == "shared":
            return True
        # The other axis still needs all chunks of this one, a block, and its own way out, one after the
        # other.
        other_path = line.inward_time() + self.costs.block + self.lines[OTHER[line.axis]].outward_time()
        channel_times = [line.inward_time() + line.outward_time() for line in self.lines.values()]
        return line.outward_cost + other_path <= max(*channel_times, self.num_todo * self.costs.block)

    # Blocks

    def _start_block(self) -> bool:
        block = self._goal_block()
        if block is None:
            block = self._filler_block()
            if block is None or (self.patient and self._interrupts()):
                return False
        row, col = block
        parts = self.own_parts if block == (0, 0) else 1
        part = parts - self.todo[row][col]
        self.todo[row][col] -= 1
        self.num_todo -= 1
        self.computing = True
        event = Event(self.now, "block", row=row, col=col, part=part, parts=parts)
        self._start(event, self.costs.of_block(parts))
        return True

    def _goal_block(self) -> tuple[int, int] | None:
        """A ready block of a line that leaves this rank, nearest to leaving first; None if there is none."""
        for line in self._goal_axes():
            usable_across = self.lines[OTHER[line.axis]].usable()
            for k in range(line.next_open(), line.usable()):
                if line.left[k]:
                    while (x := line.begun[k] + 1) < usable_across and not self._to_do(line, k, x):
                        line.begun[k] = x
                    if x < usable_across or self._to_do(line, k, 0):
                        x = x if x < usable_across else 0
                        return (k, x) if line.axis == "row" else (x, k)
        return None

    def _to_do(self, line: _Line, k: int, x: int) -> int:
        return self.todo[k][x] if line.axis == "row" else self.todo[x][k]

    def _goal_axes(self) -> list[_Line]:
        """The axes that are reduced, first the one whose next line is the goal; equal: the columns."""
        if len(self.reduced) == 1:
            return self.reduced
        row, col = self.lines["row"], self.lines["col"]
        row_misses, col_misses = row.next_misses(), col.next_misses()
        if self.by_axis:
            row_time = row.outward_time() + row_misses * self.costs.block
            col_time = col.outward_time() + col_misses * self.costs.block
            return [col, row] if col_time >= row_time else [row, col]
        if col_misses and (not row_misses or col.outward_cost * row_misses >= row.outward_cost * col_misses):
            return [col, row]
        return [row, col]

    def _filler_block(self) -> tuple[int, int] | None:
        """A ready block of lines that stay: all of the rows come before row #0, block (0, 0) last."""
        while self.edge_row < len(self.todo) and not self.todo[self.edge_row][0]:
            self.edge_row += 1
        while self.edge_col < len(self.todo[0]) and not self.todo[0][self.edge_col]:
            self.edge_col += 1
        if self.edge_row < self.lines["row"].usable():
            return self.edge_row, 0
        if self.edge_col < self.lines["col"].usable():
            return 0, self.edge_col
        return (0, 0) if self.todo[0][0] else None

    def _interrupts(self) -> bool:
        """Whether a block started now would still run when a chunk under way arrives."""
        return any(
            event.payload in INWARD and end < self.now + self.costs.block for end, _, event in self.events
        )


def _new_line(axis: Axis, direction: Direction, tile: Tile, costs: Costs) -> _Line:
    slots = Slots.of(direction, tile)
    mine = [payload for payload in payloads(direction) if AXIS[payload] == axis]
    inward = next(payload for payload in mine if payload in INWARD)
    outward = next((payload for payload in mine if payload not in INWARD), None)
    return _Line(
        axis=axis,
        size=tile.size(axis),
        inward=inward,
        inward_cost=costs.of(inward),
        outward=outward,
        outward_cost=costs.of(outward) if outward is not None else 0,
        pool=(slots.row if axis == "row" else slots.col) - 1,
        left=[tile.size(OTHER[axis])] * tile.size(axis),
        begun=[0] * tile.size(axis),
    )


@lru_cache(maxsize=256)
def build(
    direction: Direction,
    tile: Tile,
    costs: Costs,
    channels: Channels = "shared",
    direct: frozenset[Axis] = frozenset(),
) -> Schedule:
    """The step list of a pass: a pure function of its arguments, as the block order decides the bits.

    ``costs`` are integers in any unit (see ``cost.costs``); ``channels`` says whether the transfers of both
    axes share one serial channel or have one each; ``direct`` are the axes along which nothing is handed on.
    """
    return cut(direction, tile, best_order(direction, tile, costs, channels)[1], direct)


def best_order(direction: Direction, tile: Tile, costs: Costs, channels: Channels) -> tuple[int, list[Event]]:
    """The makespan and the events, by start, of the shortest of the orders; the first of equal ones."""
    goals = (False, True) if direction == "backward" else (False,)  # forward only rows leave
    least = lower_bound(direction, tile, costs, channels)
    shortest: _Simulation | None = None
    for parts, by_axis, patient in product((1,) if costs.cut is None else (1, 2), goals, (False, True)):
        run = _Simulation(
            direction, tile, costs, channels, by_axis=by_axis, patient=patient, own_parts=parts
        ).run()
        if shortest is None or run.now < shortest.now:
            shortest = run
        if shortest.now <= least:  # none is shorter
            break
    assert shortest is not None
    return shortest.now, shortest.order
