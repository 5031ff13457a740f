"""What a step list promises by itself: order, waits, slots and last uses, in local numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from .assignment import Axis
from .schedule import AXIS, INWARD, Block, Merge, Payload, Schedule, Slots, Step, Transfer, payloads


class ListCheck:
    """Follows a list entry by entry; AssertionError at what is wrong, with its step."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.tile = schedule.tile
        names = payloads(schedule.direction)
        self.inward: dict[Axis, Payload] = {AXIS[p]: p for p in names if p in INWARD}
        self.outward: dict[Axis, Payload] = {AXIS[p]: p for p in names if p not in INWARD}
        self.started: list[Transfer] = []
        self._computed: dict[tuple[int, int], set[int]] = {}  # parts of each block
        self._step = 0
        self._by_index: dict[tuple[Payload, int], Transfer] = {}
        self._hops: dict[Payload, int] = dict.fromkeys(names, 0)
        self._waited: set[int] = set()
        self._merged: set[int] = set()
        self._lands_in: dict[tuple[str, Axis, int], Transfer] = {}  # the last transfer into each receive slot
        self._last_read: dict[int, int] = {}  # transfer number -> last step that reads what it received
        slots = Slots.of(schedule.direction, schedule.tile)
        if schedule.slots != slots:
            self.fail(f"slot counts are {schedule.slots}, not {slots}")

    def fail(self, text: str) -> NoReturn:
        raise AssertionError(f"{self.schedule.direction} list of tile {self.tile}, step {self._step}: {text}")

    def begin(self, number: int, step: Step) -> None:
        self._step = number
        if len({(t.axis, t.inward) for t in step.transfers}) != len(step.transfers):
            self.fail("two transfers of one axis go the same way")

    def brings(self, axis: Axis, k: int) -> Transfer:
        """The transfer that chunk #k of an axis comes by."""
        return self._by_index[self.inward[axis], k]

    def wait(self, number: int) -> Transfer:
        if number in self._waited:
            self.fail(f"transfer {number} is waited for twice")
        if not 0 <= number < len(self.started):
            self.fail(f"transfer {number} is waited for before it starts")
        t = self.started[number]
        self._waited.add(number)
        if t.inward and t.sent:
            # The wait also ends the send of chunk #sent: until now the slot it arrived in was read.
            self._read(self._arrived(t.payload, t.sent))
        return t

    def merge(self, merge: Merge) -> Transfer:
        if not 0 <= merge.transfer < len(self.started):
            self.fail(f"transfer {merge.transfer} is merged before it starts")
        t = self.started[merge.transfer]
        if t.inward or t.payload != merge.payload:
            self.fail(f"{t.payload} {t.index} is merged as {merge.payload}")
        if t.number not in self._waited:
            self.fail(f"{t.payload} {t.index} is merged before it was waited for")
        if t.number in self._merged:
            self.fail(f"{t.payload} {t.index} is merged twice")
        if merge.index != t.received:
            self.fail(f"{t.payload} {t.index} belongs to line #{t.received}, not #{merge.index}")
        if merge.recv_slot != t.recv_slot:
            self.fail(f"{t.payload} {t.index} is in slot {t.recv_slot}, not {merge.recv_slot}")
        self._merged.add(t.number)
        self._read(t)
        self._need_slot("acc", t.axis, merge.acc)
        return t

    def start(self, t: Transfer) -> None:
        if t.payload not in self._hops:
            self.fail(f"{t.payload} does not move in this pass")
        if t.number != len(self.started):
            self.fail(f"transfer number {t.number} is out of order")
        if t.index != self._hops[t.payload] + 1:
            self.fail(f"{t.payload} {t.index} is out of index order")
        size = self.tile.size(t.axis)
        if not (t.index < size and 0 <= t.sent < size and 0 <= t.received < size):
            self.fail(f"{t.payload} {t.index}: the ring has {size} ranks")
        self._hops[t.payload] = t.index
        self.started.append(t)
        self._by_index[t.payload, t.index] = t
        if t.inward:
            self._need_slot("chunk", t.axis, t.send_slot)
            if t.sent:
                self._arrived(t.payload, t.sent)
            if t.recv_slot == 0:
                self.fail(f"{t.payload} {t.index} overwrites the own chunk")
            self._land("chunk", t)
        else:
            self._need_slot("acc", t.axis, t.send_slot)
            if t.sent == 0:
                self.fail(f"{t.payload} {t.index} sends away the own line")
            self._land("recv", t)

    def block(self, block: Block) -> bool:
        """Whether it is whole now: only then it counts."""
        name = f"block ({block.row}, {block.col})"
        if not (0 <= block.row < self.tile.a and 0 <= block.col < self.tile.b):
            self.fail(f"{name} is not in the tile")
        for axis, k, slot in sides(block):
            self._need_slot("chunk", axis, slot)
            if k:
                self._read(self._arrived(self.inward[axis], k))
        if "col" not in self.outward and block.col_acc != -1:
            self.fail(f"{name} of a forward list names a column accumulator")
        computed = self._computed.setdefault((block.row, block.col), set())
        if block.part in computed or len(computed) == block.parts or not 0 <= block.part < block.parts:
            self.fail(f"{name}: part {block.part} of {block.parts} is computed after {sorted(computed)}")
        computed.add(block.part)
        self._need_slot("acc", "row", block.row_acc)
        if "col" in self.outward:
            self._need_slot("acc", "col", block.col_acc)
        return len(computed) == block.parts

    def finish(self) -> None:
        self._step = len(self.schedule.steps)
        for t in self.started:
            if t.number not in self._waited:
                self.fail(f"{t.payload} {t.index} is never waited for")
            if t.last_use >= self._step:
                self.fail(f"{t.payload} {t.index} names a last use after the end, step {t.last_use}")
            if t.last_use != self._last_read.get(t.number):
                self.fail(f"{t.payload} {t.index} names step {t.last_use}, which does not read it, as last")
        for payload, hops in self._hops.items():
            if hops != self.tile.size(AXIS[payload]) - 1:
                self.fail(f"{payload} makes {hops} hops, not {self.tile.size(AXIS[payload]) - 1}")
        if len(self._computed) != self.tile.ranks:
            self.fail(f"each rank computes {len(self._computed)} of {self.tile.ranks} blocks")

    def _need_slot(self, kind: str, axis: Axis, slot: int) -> None:
        suffix = {"chunk": "", "acc": "_acc", "recv": "_recv"}[kind]
        count: int = getattr(self.schedule.slots, axis + suffix)
        if not 0 <= slot < count:
            self.fail(f"{kind} slot {slot} of axis {axis} does not exist, there are {count}")

    def _arrived(self, payload: Payload, index: int) -> Transfer:
        t = self._by_index.get((payload, index))
        if t is None:
            self.fail(f"{payload} {index} is used but never received")
        if t.number not in self._waited:
            self.fail(f"{payload} {index} is used before it was waited for")
        return t

    def _read(self, t: Transfer) -> None:
        if self._step > t.last_use:
            self.fail(f"{t.payload} {t.index} is in use after its last use in step {t.last_use}")
        self._last_read[t.number] = self._step

    def _land(self, kind: str, t: Transfer) -> None:
        """A transfer lands in its slot from its start on: the one before it there must be done with.

        The sender may be ahead of the receiver, so what counts is the last use that the list promises.
        """
        self._need_slot(kind, t.axis, t.recv_slot)
        before = self._lands_in.get((kind, t.axis, t.recv_slot))
        if before is not None:
            if before.last_use >= self._step:
                self.fail(f"{t.payload} {t.index} overwrites {before.payload} {before.index}, still needed")
            onward = self._by_index.get((before.payload, before.index + 1))
            handed_on = onward is not None and onward.sent == before.index
            if t.inward and onward and handed_on and onward.number not in self._waited:
                self.fail(f"{t.payload} {t.index} overwrites {before.payload} {before.index}, being sent on")
            if not t.inward and before.number not in self._merged:
                self.fail(f"{t.payload} {t.index} overwrites {before.payload} {before.index}, not merged")
        self._lands_in[kind, t.axis, t.recv_slot] = t


def sides(block: Block) -> Iterator[tuple[Axis, int, int]]:
    """Axis, chunk and slot of what a block reads."""
    yield "row", block.row, block.row_slot
    yield "col", block.col, block.col_slot
