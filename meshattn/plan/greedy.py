"""The greedy order of transfers and blocks: an event-driven simulation that decides when a resource falls idle."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import lru_cache

from .assignment import Axis, Tile
from .makespan import channel_of
from .schedule import AXIS, INWARD, Channels, Costs, Direction, Payload, Schedule, Slots, payloads
from .steps import Event, cut

AXES: tuple[Axis, Axis] = ("row", "col")


class _Simulation:
    def __init__(self, direction: Direction, tile: Tile, costs: Costs, channels: Channels, rules: dict) -> None:
        self.tile, self.costs, self.channels, self.rules = tile, costs, channels, rules
        self.slots = Slots.of(direction, tile)
        self.size = {axis: tile.size(axis) for axis in AXES}
        names = payloads(direction)
        self.inward: dict[Axis, Payload] = {AXIS[p]: p for p in names if p in INWARD}
        self.outward: dict[Axis, Payload] = {AXIS[p]: p for p in names if p not in INWARD}
        self.pool = {"row": self.slots.row - 1, "col": self.slots.col - 1}
        self.now = 0
        self.started: dict[Payload, int] = dict.fromkeys(names, 0)
        self.arrived: dict[Payload, int] = dict.fromkeys(names, 0)
        self.merged: dict[Payload, int] = {p: 0 for p in self.outward.values()}
        self.left = {"row": [tile.b] * tile.a, "col": [tile.a] * tile.b}
        self.todo = [[True] * tile.b for _ in range(tile.a)]
        self.blocks_left = tile.ranks
        self.events: list = []
        self.seq = 0
        self.compute_busy = False
        self.channel_busy = {channel_of(axis, channels): False for axis in AXES}
        self.order: list[Event] = []

    def have(self, axis):  # chunks that are there
        return 1 + self.arrived[self.inward[axis]]

    def usable(self, axis, k):
        """line k: chunk here and acc slot free"""
        if k >= self.have(axis):
            return False
        if k > self.pool[axis] > 0 and axis in self.outward:
            return self.arrived[self.outward[axis]] >= k - self.pool[axis]
        return True

    def push(self, dt, item):
        self.seq += 1
        heapq.heappush(self.events, (self.now + dt, self.seq, item))

    def run(self):
        total = sum(self.size[AXIS[p]] - 1 for p in self.started)
        while True:
            while self.decide():
                pass
            if not self.events:
                break
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                self.settle(heapq.heappop(self.events)[2])
        assert self.blocks_left == 0 and sum(self.arrived.values()) == total, "stuck"
        assert all(self.merged[p] == self.size[AXIS[p]] - 1 for p in self.merged)
        return self.order

    def settle(self, item):
        if item[0] == "block":
            _, r, c = item
            self.left["row"][r] -= 1
            self.left["col"][c] -= 1
            self.blocks_left -= 1
            self.compute_busy = False
        elif item[0] == "merge":
            self.merged[item[1]] += 1
            self.compute_busy = False
        else:
            self.arrived[item[1]] += 1
            self.channel_busy[channel_of(AXIS[item[1]], self.channels)] = False

    def decide(self):
        if not self.compute_busy:
            for p in self.merged:
                axis = AXIS[p]
                if self.merged[p] < self.arrived[p] and self.left[axis][(self.arrived[p] + 1) % self.size[axis]] == 0:
                    self.order.append(Event(self.now, "merge", p, self.arrived[p]))
                    if self.costs.merge == 0:
                        self.merged[p] += 1
                        return True
                    self.compute_busy = True
                    self.push(self.costs.merge, ("merge", p))
                    return True
        for ch, busy in self.channel_busy.items():
            if not busy:
                p = self.choose_transfer(ch)
                if p is not None:
                    self.started[p] += 1
                    self.order.append(Event(self.now, "transfer", p, self.started[p]))
                    self.channel_busy[ch] = True
                    self.push(self.costs.of(p), ("transfer", p))
                    return True
        if not self.compute_busy and self.blocks_left:
            b = self.choose_block()
            if b is not None:
                r, c = b
                self.todo[r][c] = False
                self.order.append(Event(self.now, "block", row=r, col=c))
                self.compute_busy = True
                self.push(self.costs.block, ("block", r, c))
                return True
        return False

    def can_start(self, p):
        axis = AXIS[p]
        k = self.started[p] + 1
        if k >= self.size[axis]:
            return False
        if p in INWARD:
            if self.arrived[p] < k - 1:
                return False
            old = k - self.pool[axis]
            if old > 0:  # slot of chunk #old is used again: its blocks done and its onward send complete
                return self.left[axis][old] == 0 and self.arrived[p] > old
            return True
        return self.left[axis][k] == 0 and self.merged[p] == k - 1

    def choose_transfer(self, ch):
        mine = [p for p in self.started if channel_of(AXIS[p], self.channels) == ch and self.can_start(p)]
        ins = [p for p in mine if p in INWARD]
        outs = [p for p in mine if p not in INWARD]
        best = None
        if ins:
            def profit(p):
                other = "col" if AXIS[p] == "row" else "row"
                return (1 + self.started[self.inward[other]]) / self.costs.of(p) if self.costs.of(p) else 1e9
            best = max(ins, key=lambda p: (profit(p), p == "kv"))
        if outs:
            out = max(outs, key=lambda p: (self.size[AXIS[p]] - self.started[p]) * self.costs.of(p))
            if best is None:
                return out
            return self.arbitrate(best, out)
        return best

    def ready(self):
        for r in range(self.have("row")):
            if self.left["row"][r] and self.usable("row", r):
                for c in range(self.have("col")):
                    if self.todo[r][c] and self.usable("col", c):
                        yield r, c

    def arbitrate(self, inp, out):
        mode = self.rules.get("arb", "backlog")
        if mode == "in":
            return inp
        if mode == "out":
            return out
        backlog = sum(1 for _ in self.ready()) * self.costs.block
        return out if backlog >= self.costs.of(out) else inp

    def choose_block(self):
        back = "col" in self.outward
        best = None
        for r, c in self.ready():
            if back:
                key = self.back_key(r, c)
            else:
                key = (r == 0, r, c)
            if best is None or key < best[0]:
                best = (key, (r, c))
        return None if best is None else best[1]

    def back_key(self, r, c):
        a, b = self.tile.a, self.tile.b
        # goal line: next row/col to be sent
        return (r == 0 or c == 0, r == 0 and c == 0, min(r or a, c or b), r, c)


@lru_cache(maxsize=256)
def build(direction: Direction, tile: Tile, costs: Costs, channels: Channels = "shared") -> Schedule:
    return cut(direction, tile, _Simulation(direction, tile, costs, channels, {}).run())
