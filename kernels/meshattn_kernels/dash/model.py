"""Time line of a schedule in the model of the DASH paper (arXiv 2601.21824), and proof that it ends.

A step is a computation of ``compute`` units followed by an addition into dq of ``reduce`` units. Additions
into the same query tile follow one another in the order of their turns, ``latency`` units apart. In the paper
a worker waits for its own addition before it computes on (``run_ahead`` 0); a kernel with a warp of its own
for the additions computes one step ahead (``run_ahead`` 1). Units are arbitrary; here a computation is 1.

Times follow from the tables by maxima and sums alone, so the order in which the workers are replayed does not
matter: if the replay gets stuck, so do the workers, and if it ends, every wait points to an earlier event.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from meshattn_kernels.dash.schedules import TURN_SHIFT
from meshattn_kernels.dash.table import LOAD, STORE, ScheduleTable


class Deadlock(Exception):
    """The workers of a table wait for one another for ever."""


@dataclass(frozen=True)
class Costs:
    """Durations in units of time. ``load`` and ``store`` are paid for each key/value tile in registers;
    ``jitter`` j makes each computation longer or shorter by a random part of up to j, from ``seed``."""

    compute: float = 1.0
    reduce: float = 0.25
    latency: float = 0.0
    run_ahead: int = 0
    load: float = 0.0
    store: float = 0.0
    jitter: float = 0.0
    seed: int = 0


MEASURED = Costs(compute=1.0, reduce=0.25, latency=0.35, run_ahead=1, load=1.0, store=1.0)
"""The kernel on an H200 in units of a step of about 2.3 us: a handoff takes 1.4 us."""


class Event(NamedTuple):
    """One step on the time line: [start, ready) is computation, [begin, end) the addition."""

    worker: int
    head: int
    kv: int
    query: int
    turn: int
    start: float
    ready: float
    begin: float
    end: float
    after: int
    """Event whose end let the addition begin; -1 if the computation of this step did."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """A replayed table. ``work`` is the time of all computations and additions that block a worker, and loads
    and stores; ``longest`` that of the longest chain of one key/value tile."""

    events: tuple[Event, ...]
    """In the order of the replay: a worker's events are in order, and so are those of a query tile."""
    workers: int
    makespan: float
    work: float
    longest: float

    @property
    def lower_bound(self) -> float:
        """No order of the same tasks is shorter: the fair share of the work, or the longest task."""
        return max(self.work / self.workers, self.longest)

    @property
    def ratio(self) -> float:
        """Makespan in units of the lower bound; 1 is optimal."""
        return self.makespan / self.lower_bound if self.lower_bound else 1.0

    def by_worker(self) -> list[list[Event]]:
        """Events of each worker, in order of time."""
        rows: list[list[Event]] = [[] for _ in range(self.workers)]
        for event in self.events:
            rows[event.worker].append(event)
        return rows

    def critical_path(self) -> list[Event]:
        """Events from the start to the last one, each waiting for the one before it."""
        if not self.events:
            return []
        before: dict[int, int] = {}
        last_of: dict[int, int] = {}
        for number, event in enumerate(self.events):
            before[number] = last_of.get(event.worker, -1)
            last_of[event.worker] = number
        number = max(range(len(self.events)), key=lambda n: self.events[n].end)
        path = []
        while number >= 0:
            path.append(self.events[number])
            after = self.events[number].after
            number = after if after >= 0 else before[number]
        return path[::-1]


def simulate(table: ScheduleTable, costs: Costs | None = None) -> Timeline:
    """Replay a table with all its workers resident; ``costs`` None means the defaults of ``Costs``.

    Raises Deadlock, naming a worker that waits for ever.
    """
    return _Replay(table, costs or Costs()).run()


def prove(table: ScheduleTable) -> None:
    """Raises Deadlock if a wait of the table is never met with all its workers resident."""
    simulate(table)


Wait = tuple[int, int]
"""(counter, turn): to be continued when the counter has this value."""


class _Replay:
    """Workers as coroutines that yield what they wait for; counters with the time of their last change."""

    def __init__(self, table: ScheduleTable, costs: Costs) -> None:
        self.table, self.costs = table, costs
        self.tasks: list[list[int]] = table.tasks.tolist()
        self.steps: list[int] = table.steps.tolist()
        self.worker_start: list[int] = table.worker_start.tolist()
        # Counters of dq first, then those of dk, dv.
        self.dkv_counters = table.heads * table.query_tiles
        counters = self.dkv_counters + table.kv_heads * table.kv_tiles
        self.value = [0] * counters
        self.changed = [0.0] * counters
        self.last_event = [-1] * counters
        self.waiting: dict[Wait, int] = {}
        self.runnable = list(range(table.workers))[::-1]
        self.events: list[Event] = []
        self.makespan = self.work = self.longest = 0.0
        self.random = random.Random(costs.seed)

    def run(self) -> Timeline:
        programs = [self.worker(number) for number in range(self.table.workers)]
        while self.runnable:
            number = self.runnable.pop()
            wait = next(programs[number], None)
            if wait is not None:
                self.waiting[wait] = number
        if self.waiting:
            (counter, turn), number = min(self.waiting.items(), key=lambda item: item[1])
            kind, tiles = ("query", self.table.query_tiles)
            if counter >= self.dkv_counters:
                kind, tiles, counter = "key/value", self.table.kv_tiles, counter - self.dkv_counters
            raise Deadlock(
                f"{len(self.waiting)} of {self.table.workers} workers of {self.table.name!r} wait for ever: "
                f"worker {number} for turn {turn} at {kind} tile {counter % tiles} of head {counter // tiles}"
            )
        return Timeline(tuple(self.events), self.table.workers, self.makespan, self.work, self.longest)

    def worker(self, number: int) -> Iterator[Wait]:
        """All tasks of one worker; yields before each event that must wait for another worker."""
        costs, events = self.costs, self.events
        clock = 0.0  # end of the last computation, load or store
        ends = [0.0] * (costs.run_ahead + 1)  # of the last additions, oldest first
        step_work = costs.compute + costs.reduce if not costs.run_ahead else max(costs.compute, costs.reduce)
        chain = 0.0
        for head, kv_head, kv, first, count, flags, dkv_turn, _ in self.tasks[
            self.worker_start[number] : self.worker_start[number + 1]
        ]:
            if flags & LOAD:
                clock = max(clock, ends[0]) + costs.load
                chain = costs.load
            chain += count * step_work
            for entry in self.steps[first : first + count]:
                query, turn = entry & (1 << TURN_SHIFT) - 1, entry >> TURN_SHIFT
                start = max(clock, ends[0])
                spread = costs.jitter * self.random.uniform(-1.0, 1.0) if costs.jitter else 0.0
                clock = start + costs.compute * (1.0 + spread)
                counter = head * self.table.query_tiles + query
                if self.value[counter] != turn:
                    yield counter, turn
                begin, after = max(clock, ends[-1]), -1
                if turn and self.changed[counter] + costs.latency > begin:
                    begin, after = self.changed[counter] + costs.latency, self.last_event[counter]
                end = begin + costs.reduce
                ends = [*ends[1:], end]
                self.last_event[counter] = len(events)
                events.append(Event(number, head, kv, query, turn, start, clock, begin, end, after))
                self.release(counter, end)
            if flags & STORE:
                clock = max(clock, ends[0])
                if dkv_turn >= 0:
                    counter = self.dkv_counters + kv_head * self.table.kv_tiles + kv
                    if self.value[counter] != dkv_turn:
                        yield counter, dkv_turn
                    if dkv_turn:
                        clock = max(clock, self.changed[counter] + costs.latency)
                clock += costs.store
                if dkv_turn >= 0:
                    self.release(counter, clock)
                chain += costs.store
                self.work += chain
                self.longest = max(self.longest, chain)
            self.makespan = max(self.makespan, clock, ends[-1])

    def release(self, counter: int, time: float) -> None:
        self.value[counter] += 1
        self.changed[counter] = time
        number = self.waiting.pop((counter, self.value[counter]), None)
        if number is not None:
            self.runnable.append(number)
