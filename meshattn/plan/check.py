"""Proof that a step list is right, by running it for all ranks on chunk numbers instead of tensors.

The checker shares nothing with the builder but the assignment matrix and the meaning of a step. It lets every transfer
arrive as early as possible (its receive slot changes hands at the start) and as late as possible (its data may be read
only after the wait), so what it accepts is right for any timing between the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .assignment import Assignment, Axis
from .schedule import AXIS, INWARD, Block, Merge, Payload, Schedule, Slots, Transfer, payloads


@dataclass
class _Accumulator:
    """What an accumulator slot holds: a line, the chunks that went into it (bits), and how it is being used."""

    line: int  # local number
    parts: int = 0
    sending: int | None = None  # number of the transfer that reads it
    gone: bool = False  # sent and waited for: the slot may be taken


@dataclass
class _Rank:
    """Slots of one rank. A chunk slot holds a global chunk number, a receive slot a set of chunks (bits)."""

    number: int
    chunks: dict[tuple[Axis, int], int] = field(default_factory=dict)
    accs: dict[tuple[Axis, int], _Accumulator] = field(default_factory=dict)
    partials: dict[tuple[Axis, int], int] = field(default_factory=dict)
    computed: set[tuple[int, int]] = field(default_factory=set)


@dataclass
class _Flight:
    """A transfer from its start to its wait."""

    transfer: Transfer
    step: int


def check(schedule: Schedule) -> None:
    """Prove a list for every rank of its tile; AssertionError that says what is wrong, and where, if it is not right.

    Each block once and by its owner; sends and receives match pairwise on all ranks; nothing is read before it was
    waited for; no slot is overwritten while it is read, sent or still needed, also on the receiver's side; every row
    and, backward, every column ends complete on its owner with each contribution once; each transfer is waited for
    once; the slots are those of ``Slots.of``.
    """
    _Checker(schedule).run()


class _Checker:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.tile = schedule.tile
        self.assignment = Assignment(schedule.tile)
        self.inward: dict[Axis, Payload] = {}
        self.outward: dict[Axis, Payload] = {}
        for payload in payloads(schedule.direction):
            (self.inward if payload in INWARD else self.outward)[AXIS[payload]] = payload
        self.ranks = [_Rank(i) for i in range(self.tile.ranks)]
        for rank in self.ranks:
            rank.chunks["row", 0] = rank.chunks["col", 0] = rank.number
        self.step = 0
        self.flights: dict[int, _Flight] = {}
        self.waited: set[int] = set()
        self.merged: set[int] = set()
        self.started: dict[Payload, int] = dict.fromkeys(payloads(schedule.direction), 0)
        self.owner_of_slot: dict[tuple[str, Axis, int], Transfer] = {}
        self.reads: dict[int, int] = {}  # transfer number -> last step that reads what it received or its onward send

    def run(self) -> None:
        assert self.schedule.slots == Slots.of(self.schedule.direction, self.tile), (
            f"slot counts {self.schedule.slots} are not those of tile {self.tile}"
        )
        for self.step, step in enumerate(self.schedule.steps):
            for number in step.waits:
                self._wait(number)
            for merge in step.merges:
                self._merge(merge)
            self._one_of_each(step.transfers)
            for transfer in step.transfers:
                self._start(transfer)
            for block in step.blocks:
                self._block(block)
        self._finish()

    def _fail(self, text: str) -> str:
        return f"{self.schedule.direction} list of tile {self.tile}, step {self.step}: {text}"

    def _chunk(self, rank: int, axis: Axis, k: int) -> int:
        """Global number of the chunk that ``rank`` calls #k on an axis."""
        return self.assignment.query_chunk(rank, k) if axis == "row" else self.assignment.key_chunk(rank, k)

    def _slot_exists(self, kind: str, axis: Axis, slot: int) -> None:
        slots = self.schedule.slots
        count = {
            ("chunk", "row"): slots.row,
            ("chunk", "col"): slots.col,
            ("acc", "row"): slots.row_acc,
            ("acc", "col"): slots.col_acc,
            ("recv", "row"): slots.row_recv,
            ("recv", "col"): slots.col_recv,
        }[kind, axis]
        assert 0 <= slot < count, self._fail(f"{kind} slot {slot} of axis {axis} is not one of {count}")

    def _one_of_each(self, transfers: tuple[Transfer, ...]) -> None:
        kinds = [(t.axis, t.inward) for t in transfers]
        assert len(set(kinds)) == len(kinds), self._fail("two transfers of one axis go the same way")

    # Waits and merges

    def _wait(self, number: int) -> None:
        assert number not in self.waited, self._fail(f"transfer {number} is waited for twice")
        assert number in self.flights, self._fail(f"transfer {number} is waited for before it starts")
        t = self.flights[number].transfer
        self.waited.add(number)
        if not t.inward:
            for rank in self.ranks:
                acc = rank.accs[t.axis, t.send_slot]
                acc.sending, acc.gone = None, True
        elif t.index > 1:
            # The wait also ends the send of chunk #(k-1), which is a read of what the transfer before received.
            self._read(self._arrived(t.payload, t.index - 1))

    def _arrived(self, payload: Payload, index: int) -> Transfer:
        found = [f.transfer for f in self.flights.values() if (f.transfer.payload, f.transfer.index) == (payload, index)]
        assert found, self._fail(f"{payload} #{index} is used but never received")
        assert found[0].number in self.waited, self._fail(f"{payload} #{index} is used before it was waited for")
        return found[0]

    def _read(self, t: Transfer) -> None:
        self.reads[t.number] = self.step

    def _merge(self, merge: Merge) -> None:
        assert merge.transfer in self.flights, self._fail(f"transfer {merge.transfer} is merged before it starts")
        t = self.flights[merge.transfer].transfer
        axis = t.axis
        assert not t.inward and t.payload == merge.payload, self._fail(f"{t.payload} is merged as {merge.payload}")
        assert merge.transfer in self.waited, self._fail(f"transfer {t.number} is merged before it was waited for")
        assert merge.transfer not in self.merged, self._fail(f"transfer {t.number} is merged twice")
        assert merge.index == t.received, self._fail(f"partial of line #{t.received} is merged into #{merge.index}")
        assert merge.recv_slot == t.recv_slot, self._fail(f"merge reads slot {merge.recv_slot}, not {t.recv_slot}")
        self.merged.add(merge.transfer)
        self._read(t)
        for rank in self.ranks:
            acc = self._accumulator(rank, axis, merge.acc, merge.index, first=False)
            self._add(rank, acc, rank.partials[axis, merge.recv_slot])

    # Transfers

    def _start(self, t: Transfer) -> None:
        assert self.outward.get(t.axis) == t.payload or self.inward[t.axis] == t.payload, self._fail(
            f"{t.payload} does not move in this pass"
        )
        assert t.number == len(self.flights), self._fail(f"transfer number {t.number} is out of order")
        assert t.index == self.started[t.payload] + 1, self._fail(f"{t.payload} {t.index} is out of index order")
        self.started[t.payload] = t.index
        self.flights[t.number] = _Flight(t, self.step)
        if t.inward:
            self._start_inward(t)
        else:
            self._start_outward(t)

    def _take_slot(self, kind: str, t: Transfer) -> None:
        """A transfer lands in its slot from its start on: the transfer before it in that slot must be done with."""
        self._slot_exists(kind, t.axis, t.recv_slot)
        before = self.owner_of_slot.get((kind, t.axis, t.recv_slot))
        if before is not None:
            assert before.last_use < self.step, self._fail(
                f"{t.payload} {t.index} overwrites slot {t.recv_slot}, which {before.payload} {before.index} needs "
                f"until the end of step {before.last_use}"
            )
            onward = (before.payload, before.index + 1)
            for flight in self.flights.values():
                done = flight.transfer.number in self.waited
                assert (flight.transfer.payload, flight.transfer.index) != onward or done or not t.inward, self._fail(
                    f"{t.payload} {t.index} overwrites slot {t.recv_slot} while it is being sent on"
                )
            assert t.inward or before.number in self.merged, self._fail(
                f"{t.payload} {t.index} overwrites slot {t.recv_slot} before it was merged"
            )
        self.owner_of_slot[kind, t.axis, t.recv_slot] = t

    def _start_inward(self, t: Transfer) -> None:
        axis = t.axis
        self._slot_exists("chunk", axis, t.send_slot)
        assert t.recv_slot != 0, self._fail(f"{t.payload} {t.index} overwrites the own chunk")
        if t.sent:
            self._arrived(t.payload, t.sent)
        self._take_slot("chunk", t)
        arriving: list[int] = []
        for rank in self.ranks:
            sender = self.ranks[self.assignment.neighbour(rank.number, axis, -t.offset)]
            assert self.assignment.neighbour(sender.number, axis, t.offset) == rank.number, self._fail(
                f"{t.payload} {t.index}: the send of rank {sender.number} has no receive"
            )
            sent = sender.chunks.get((axis, t.send_slot))
            assert sent == self._chunk(sender.number, axis, t.sent), self._fail(
                f"{t.payload} {t.index}: rank {sender.number} sends chunk {sent} as its #{t.sent}"
            )
            expected = self._chunk(rank.number, axis, t.received)
            assert sent == expected, self._fail(
                f"{t.payload} {t.index}: rank {rank.number} expects chunk {expected} but gets {sent}"
            )
            arriving.append(expected)
        for rank, chunk in zip(self.ranks, arriving, strict=True):
            rank.chunks[axis, t.recv_slot] = chunk

    def _start_outward(self, t: Transfer) -> None:
        axis = t.axis
        self._slot_exists("acc", axis, t.send_slot)
        assert t.sent != 0, self._fail(f"{t.payload} {t.index} sends away the own line")
        self._take_slot("recv", t)
        line_length = self.tile.size("col" if axis == "row" else "row")
        arriving: list[int] = []
        for rank in self.ranks:
            acc = rank.accs.get((axis, t.send_slot))
            assert acc is not None and acc.line == t.sent, self._fail(
                f"{t.payload} {t.index}: slot {t.send_slot} of rank {rank.number} does not hold line #{t.sent}"
            )
            # Rank i adds its own blocks; each earlier hop of the chain added those of one more neighbour.
            assert acc.parts.bit_count() == t.index * line_length, self._fail(
                f"{t.payload} {t.index}: rank {rank.number} sends line #{t.sent} with {acc.parts.bit_count()} of "
                f"{t.index * line_length} contributions"
            )
            assert not acc.gone and acc.sending is None, self._fail(f"line #{t.sent} is sent twice")
            acc.sending = t.number
        for rank in self.ranks:
            sender = self.ranks[self.assignment.neighbour(rank.number, axis, -t.offset)]
            assert self.assignment.neighbour(sender.number, axis, t.offset) == rank.number, self._fail(
                f"{t.payload} {t.index}: the send of rank {sender.number} has no receive"
            )
            sent, got = self._chunk(sender.number, axis, t.sent), self._chunk(rank.number, axis, t.received)
            assert sent == got, self._fail(
                f"{t.payload} {t.index}: rank {rank.number} expects line {got} but gets {sent}"
            )
            arriving.append(sender.accs[axis, t.send_slot].parts)
        for rank, parts in zip(self.ranks, arriving, strict=True):
            rank.partials[axis, t.recv_slot] = parts

    # Blocks

    def _block(self, block: Block) -> None:
        for axis, k, slot in (("row", block.row, block.row_slot), ("col", block.col, block.col_slot)):
            assert axis == "row" or axis == "col"
            self._slot_exists("chunk", axis, slot)
            if k:
                self._read(self._arrived(self.inward[axis], k))
        for rank in self.ranks:
            p, q = rank.chunks.get(("row", block.row_slot)), rank.chunks.get(("col", block.col_slot))
            here = (self._chunk(rank.number, "row", block.row), self._chunk(rank.number, "col", block.col))
            assert (p, q) == here, self._fail(
                f"rank {rank.number} computes block ({p}, {q}) where ({block.row}, {block.col}) means {here}"
            )
            assert here not in rank.computed, self._fail(f"block ({block.row}, {block.col}) is computed twice")
            assert self.assignment.owner(*here) == rank.number, self._fail(f"rank {rank.number} does not own {here}")
            rank.computed.add(here)
            self._add(rank, self._accumulator(rank, "row", block.row_acc, block.row, first=True), 1 << here[1])
            if "col" in self.outward:
                self._add(rank, self._accumulator(rank, "col", block.col_acc, block.col, first=True), 1 << here[0])
        assert "col" in self.outward or block.col_acc == -1, self._fail("a forward block names a column accumulator")

    def _accumulator(self, rank: _Rank, axis: Axis, slot: int, line: int, *, first: bool) -> _Accumulator:
        """The accumulator of a line, taken from the line that had the slot before if that one has left."""
        self._slot_exists("acc", axis, slot)
        acc = rank.accs.get((axis, slot))
        if acc is not None and acc.line == line and not acc.gone:
            return acc
        assert first, self._fail(f"accumulator slot {slot} of axis {axis} does not hold line #{line} yet")
        assert acc is None or (acc.gone and acc.line != line), self._fail(
            f"line #{line} takes accumulator slot {slot} of axis {axis}, which line #{acc.line if acc else 0} needs"
        )
        new = _Accumulator(line)
        rank.accs[axis, slot] = new
        return new

    def _add(self, rank: _Rank, acc: _Accumulator, parts: int) -> None:
        assert acc.sending is None, self._fail(f"line #{acc.line} of rank {rank.number} changes while it is sent")
        assert not acc.parts & parts, self._fail(f"line #{acc.line} of rank {rank.number} gets a contribution twice")
        acc.parts |= parts

    # The end

    def _finish(self) -> None:
        self.step = len(self.schedule.steps)
        missing = set(self.flights) - self.waited
        assert not missing, self._fail(f"transfers {sorted(missing)} are never waited for")
        for payload, count in self.started.items():
            expected = self.tile.size(AXIS[payload]) - 1
            assert count == expected, self._fail(f"{payload} makes {count} hops, not {expected}")
        everything = (1 << self.tile.ranks) - 1
        for rank in self.ranks:
            assert len(rank.computed) == self.tile.ranks, self._fail(
                f"rank {rank.number} computes {len(rank.computed)} of {self.tile.ranks} blocks"
            )
            for axis in self.outward:
                own = rank.accs[axis, 0]
                assert own.line == 0 and own.parts == everything, self._fail(
                    f"rank {rank.number} ends with {own.parts.bit_count()} of {self.tile.ranks} contributions to its "
                    f"own {axis}"
                )
        for number, flight in self.flights.items():
            t = flight.transfer
            assert self.reads.get(number, flight.step) <= t.last_use < self.step, self._fail(
                f"{t.payload} {t.index} is read in step {self.reads.get(number)}, after its last use {t.last_use}"
            )
