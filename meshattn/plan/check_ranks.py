"""What all ranks hold by a step list, and send to each other, in global chunk numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .assignment import Assignment, Axis
from .check_list import ListCheck, sides
from .hops import Hops, Paths, Visibility
from .schedule import Block, Merge, Transfer


@dataclass
class _Accumulator:
    """What an accumulator slot holds: a line, the chunks that went into it as bits, and its use."""

    line: int  # local number
    parts: int = 0
    sending: int | None = None  # number of the transfer that reads it
    gone: bool = False  # sent and waited for: the slot may be taken


@dataclass
class _Rank:
    """Slots of one rank, keyed by (axis, slot). A chunk slot holds a global chunk number."""

    number: int
    chunks: dict[tuple[Axis, int], int] = field(default_factory=dict)
    accs: dict[tuple[Axis, int], _Accumulator] = field(default_factory=dict)
    partials: dict[tuple[Axis, int], int] = field(default_factory=dict)  # contributions received, as bits
    used: set[int] = field(default_factory=set)  # transfers whose chunk a block reads, or that is sent on


class RankCheck:
    """Does for every rank what the list says, entry by entry, right after ``listed`` has looked at it."""

    def __init__(self, listed: ListCheck, visibility: Visibility, hops: Sequence[Hops], paths: Paths) -> None:
        self.listed = listed
        self.fail = listed.fail
        self.visibility = visibility
        self.hops_of = hops
        tile = listed.tile
        self.assignment = Assignment(tile, paths.turned)
        ranks, rows, cols = range(tile.ranks), range(tile.a), range(tile.b)
        # Global number of the chunk that a rank calls #k, as [rank][k].
        self.chunk: dict[Axis, list[list[int]]] = {
            "row": [[self.assignment.chunk(i, "row", k) for k in rows] for i in ranks],
            "col": [[self.assignment.chunk(i, "col", k) for k in cols] for i in ranks],
        }
        self.ranks = [_Rank(i) for i in ranks]
        for rank in self.ranks:
            rank.chunks["row", 0] = rank.chunks["col", 0] = rank.number
            rank.accs = {(axis, 0): _Accumulator(0) for axis in listed.outward}

    def wait(self, t: Transfer) -> None:
        if not t.inward:
            for rank in self.ranks:
                acc = rank.accs[t.axis, t.send_slot]
                acc.sending, acc.gone = None, True

    def merge(self, t: Transfer, merge: Merge) -> None:
        for rank in self.ranks:
            acc = self._accumulator(rank, t.axis, merge.acc, merge.index, first=False)
            if self.hops_of[rank.number].receives(t):
                self._add(rank, acc, rank.partials[t.axis, t.recv_slot])

    def start(self, t: Transfer) -> None:
        if not t.inward:
            self._leave(t)
        self._exchange(t)

    def _leave(self, t: Transfer) -> None:
        """A partial leaves once, if it holds anything: what comes to its line later would be missed at the
        end."""
        for rank in self.ranks:
            acc = rank.accs.get((t.axis, t.send_slot))
            if acc is None or acc.line != t.sent:
                self.fail(f"{t.payload} {t.index}: slot {t.send_slot} does not hold line #{t.sent}")
            if acc.gone or acc.sending is not None:
                self.fail(f"{t.payload} {t.index}: line #{t.sent} is sent twice")
            if self.hops_of[rank.number].sends(t) != (acc.parts != 0):
                self.fail(
                    f"{t.payload} {t.index}: rank {rank.number} has {acc.parts.bit_count()} contributions to "
                    f"line #{t.sent}, and {'keeps them' if acc.parts else 'sends it'}"
                )
            acc.sending = t.number

    def _exchange(self, t: Transfer) -> None:
        """A rank sends if and only if its peer receives, and what the peer counts as #received."""
        arriving: list[int | None] = []
        for rank in self.ranks:
            sender = self.ranks[self.assignment.neighbour(rank.number, t.axis, -t.offset)]
            if self.assignment.neighbour(sender.number, t.axis, t.offset) != rank.number:
                self.fail(f"{t.payload} {t.index}: rank {sender.number} does not send to {rank.number}")
            sends = self.hops_of[sender.number].sends(t)
            if sends != self.hops_of[rank.number].receives(t):
                who = f"rank {sender.number} {'sends' if sends else 'does not send'}"
                self.fail(f"{t.payload} {t.index}: {who}, rank {rank.number} thinks otherwise")
            sent = self.chunk[t.axis][sender.number][t.sent]
            if sends and t.inward and sender.chunks.get((t.axis, t.send_slot)) != sent:
                self.fail(f"{t.payload} {t.index}: slot {t.send_slot} does not hold #{t.sent}")
            expected = self.chunk[t.axis][rank.number][t.received]
            if sent != expected:
                self.fail(f"{t.payload} {t.index}: rank {rank.number} expects {expected}, gets {sent}")
            if not sends:
                arriving.append(None)
            else:
                arriving.append(sent if t.inward else sender.accs[t.axis, t.send_slot].parts)
                if t.inward and t.sent:
                    sender.used.add(self.listed.brings(t.axis, t.sent).number)
        for rank, content in zip(self.ranks, arriving, strict=True):
            slots = rank.chunks if t.inward else rank.partials
            slots.pop((t.axis, t.recv_slot), None)
            if content is not None:
                slots[t.axis, t.recv_slot] = content

    def block(self, block: Block, *, whole: bool) -> None:
        name = f"block ({block.row}, {block.col})"
        for rank in self.ranks:
            p, q = self.chunk["row"][rank.number][block.row], self.chunk["col"][rank.number][block.col]
            seen = self.visibility.sees(p, q)
            adds = seen and whole
            if seen and (
                rank.chunks.get(("row", block.row_slot)),
                rank.chunks.get(("col", block.col_slot)),
            ) != (p, q):
                self.fail(f"{name}: its slots do not hold the chunks {p} and {q} of rank {rank.number}")
            if self.assignment.owner(p, q) != rank.number:
                self.fail(f"{name}: rank {rank.number} does not own ({p}, {q})")
            row = self._accumulator(rank, "row", block.row_acc, block.row, first=True)
            self._add(rank, row, adds << q)
            if "col" in self.listed.outward:
                col = self._accumulator(rank, "col", block.col_acc, block.col, first=True)
                self._add(rank, col, adds << p)
            if seen:
                received = [self.listed.brings(axis, k) for axis, k, _ in sides(block) if k]
                rank.used.update(t.number for t in received)

    def _accumulator(self, rank: _Rank, axis: Axis, slot: int, line: int, *, first: bool) -> _Accumulator:
        """The accumulator of a line; a block may take the slot over from a line that has left."""
        acc = rank.accs.get((axis, slot))
        if acc is not None and acc.line == line and not acc.gone:
            return acc
        if not first:
            self.fail(f"accumulator slot {slot} of axis {axis} does not hold line #{line}")
        if acc is not None and not acc.gone:
            self.fail(f"line #{line} takes accumulator slot {slot} of axis {axis} from line #{acc.line}")
        if acc is not None and acc.line == line:
            self.fail(f"line #{line} of axis {axis} goes on after it was sent")
        new = _Accumulator(line)
        rank.accs[axis, slot] = new
        return new

    def _add(self, rank: _Rank, acc: _Accumulator, parts: int) -> None:
        if acc.sending is not None:
            self.fail(f"line #{acc.line} of rank {rank.number} changes while it is sent")
        if acc.parts & parts:
            self.fail(f"line #{acc.line} of rank {rank.number} gets a contribution twice")
        acc.parts |= parts

    def finish(self) -> None:
        for rank in self.ranks:
            for t in self.listed.started:
                if t.inward and self.hops_of[rank.number].receives(t) and t.number not in rank.used:
                    self.fail(f"rank {rank.number} receives {t.payload} {t.index} in vain")
            for axis in self.listed.outward:
                own = rank.accs[axis, 0]
                if own.line != 0 or own.parts != self.visibility.line(axis, rank.number):
                    self.fail(f"rank {rank.number} ends with {own.parts.bit_count()} parts in its {axis} #0")
