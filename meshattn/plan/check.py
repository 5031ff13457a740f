"""Proof that a step list is right, by running it for all ranks on chunk numbers instead of tensors.

The checker shares nothing with the builder but the assignment matrix and the meaning of a step. It lets every
transfer arrive as early as possible (its receive slot changes hands at the start) and as late as possible
(its data may be read only after the wait), so what it accepts is right for any timing between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from .assignment import Assignment, Axis
from .hops import RINGS, Hops, Paths, Reach, Visibility
from .schedule import AXIS, INWARD, Block, Merge, Payload, Schedule, Slots, Transfer, payloads


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


def check(
    schedule: Schedule,
    visibility: Visibility | None = None,
    hops: Sequence[Hops] | None = None,
    paths: Paths = RINGS,
) -> None:
    """Prove a list for every rank of its tile; AssertionError that says what is wrong, and in which step.

    ``visibility`` says which blocks have anything to compute (by default all), ``hops`` which hops each rank
    takes part in (by default those of ``hops_of``), ``paths`` how it moves things.

    Each block once and by its owner; sends and receives match pairwise on all ranks; nothing is read before
    it was waited for; no slot is overwritten while it is read, sent or still needed, also on the receiver's
    side; every row and, backward, every column ends complete on its owner with each contribution once; each
    transfer is waited for once; the slots are those of ``Slots.of``. Empty blocks are not run and contribute
    nothing; a hop takes place if and only if it carries something that is used.
    """
    visibility = visibility or Visibility.full(schedule.tile.ranks)
    if hops is None:
        reach = Reach(schedule.tile, visibility)
        hops = [reach.hops(rank, paths) for rank in range(schedule.tile.ranks)]
    _Checker(schedule, visibility, hops, paths).run()


class _Checker:
    def __init__(
        self, schedule: Schedule, visibility: Visibility, hops: Sequence[Hops], paths: Paths
    ) -> None:
        self.schedule = schedule
        self.visibility = visibility
        self.hops_of = hops
        self.tile = schedule.tile
        self.assignment = Assignment(schedule.tile, paths.turned)
        names = payloads(schedule.direction)
        self.inward: dict[Axis, Payload] = {AXIS[p]: p for p in names if p in INWARD}
        self.outward: dict[Axis, Payload] = {AXIS[p]: p for p in names if p not in INWARD}
        ranks = range(self.tile.ranks)
        rows, cols = range(self.tile.a), range(self.tile.b)
        # Global number of the chunk that a rank calls #k, as [rank][k].
        self.chunk: dict[Axis, list[list[int]]] = {
            "row": [[self.assignment.chunk(i, "row", k) for k in rows] for i in ranks],
            "col": [[self.assignment.chunk(i, "col", k) for k in cols] for i in ranks],
        }
        self.ranks = [_Rank(i) for i in ranks]
        for rank in self.ranks:
            rank.chunks["row", 0] = rank.chunks["col", 0] = rank.number
            rank.accs = {(axis, 0): _Accumulator(0) for axis in self.outward}
        # Parts of each block in local numbers, the same for all ranks.
        self.computed: dict[tuple[int, int], set[int]] = {}
        self.step = 0
        self.started: list[Transfer] = []
        self.by_index: dict[tuple[Payload, int], Transfer] = {}
        self.hops: dict[Payload, int] = dict.fromkeys(names, 0)
        self.waited: set[int] = set()
        self.merged: set[int] = set()
        self.lands_in: dict[tuple[str, Axis, int], Transfer] = {}  # the last transfer into each receive slot
        self.last_read: dict[int, int] = {}  # transfer number -> last step that reads what it received

    def run(self) -> None:
        slots = Slots.of(self.schedule.direction, self.tile)
        if self.schedule.slots != slots:
            self._fail(f"slot counts are {self.schedule.slots}, not {slots}")
        for number, step in enumerate(self.schedule.steps):
            self.step = number
            for transfer_number in step.waits:
                self._wait(transfer_number)
            for merge in step.merges:
                self._merge(merge)
            if len({(t.axis, t.inward) for t in step.transfers}) != len(step.transfers):
                self._fail("two transfers of one axis go the same way")
            for transfer in step.transfers:
                self._start(transfer)
            for block in step.blocks:
                self._block(block)
        self._finish()

    def _fail(self, text: str) -> NoReturn:
        raise AssertionError(f"{self.schedule.direction} list of tile {self.tile}, step {self.step}: {text}")

    def _need_slot(self, kind: str, axis: Axis, slot: int) -> None:
        suffix = {"chunk": "", "acc": "_acc", "recv": "_recv"}[kind]
        count: int = getattr(self.schedule.slots, axis + suffix)
        if not 0 <= slot < count:
            self._fail(f"{kind} slot {slot} of axis {axis} does not exist, there are {count}")

    # Waits and merges

    def _wait(self, number: int) -> None:
        if number in self.waited:
            self._fail(f"transfer {number} is waited for twice")
        if not 0 <= number < len(self.started):
            self._fail(f"transfer {number} is waited for before it starts")
        t = self.started[number]
        self.waited.add(number)
        if not t.inward:
            for rank in self.ranks:
                acc = rank.accs[t.axis, t.send_slot]
                acc.sending, acc.gone = None, True
        elif t.sent:
            # The wait also ends the send of chunk #sent: until now the slot it arrived in was read.
            self._read(self._arrived(t.payload, t.sent))

    def _arrived(self, payload: Payload, index: int) -> Transfer:
        t = self.by_index.get((payload, index))
        if t is None:
            self._fail(f"{payload} {index} is used but never received")
        if t.number not in self.waited:
            self._fail(f"{payload} {index} is used before it was waited for")
        return t

    def _read(self, t: Transfer) -> None:
        if self.step > t.last_use:
            self._fail(f"{t.payload} {t.index} is in use after its last use in step {t.last_use}")
        self.last_read[t.number] = self.step

    def _merge(self, merge: Merge) -> None:
        if not 0 <= merge.transfer < len(self.started):
            self._fail(f"transfer {merge.transfer} is merged before it starts")
        t = self.started[merge.transfer]
        if t.inward or t.payload != merge.payload:
            self._fail(f"{t.payload} {t.index} is merged as {merge.payload}")
        if t.number not in self.waited:
            self._fail(f"{t.payload} {t.index} is merged before it was waited for")
        if t.number in self.merged:
            self._fail(f"{t.payload} {t.index} is merged twice")
        if merge.index != t.received:
            self._fail(f"{t.payload} {t.index} belongs to line #{t.received}, not #{merge.index}")
        if merge.recv_slot != t.recv_slot:
            self._fail(f"{t.payload} {t.index} is in slot {t.recv_slot}, not {merge.recv_slot}")
        self.merged.add(t.number)
        self._read(t)
        self._need_slot("acc", t.axis, merge.acc)
        for rank in self.ranks:
            acc = self._accumulator(rank, t.axis, merge.acc, merge.index, first=False)
            if self.hops_of[rank.number].receives(t):
                self._add(rank, acc, rank.partials[t.axis, t.recv_slot])

    # Transfers

    def _start(self, t: Transfer) -> None:
        if t.payload not in self.hops:
            self._fail(f"{t.payload} does not move in this pass")
        if t.number != len(self.started):
            self._fail(f"transfer number {t.number} is out of order")
        if t.index != self.hops[t.payload] + 1:
            self._fail(f"{t.payload} {t.index} is out of index order")
        size = self.tile.size(t.axis)
        if not (t.index < size and 0 <= t.sent < size and 0 <= t.received < size):
            self._fail(f"{t.payload} {t.index}: the ring has {size} ranks")
        self.hops[t.payload] = t.index
        self.started.append(t)
        self.by_index[t.payload, t.index] = t
        if t.inward:
            self._need_slot("chunk", t.axis, t.send_slot)
            if t.sent:
                self._arrived(t.payload, t.sent)
            if t.recv_slot == 0:
                self._fail(f"{t.payload} {t.index} overwrites the own chunk")
            self._land("chunk", t)
        else:
            self._need_slot("acc", t.axis, t.send_slot)
            self._leave(t)
            self._land("recv", t)
        self._exchange(t)

    def _land(self, kind: str, t: Transfer) -> None:
        """A transfer lands in its slot from its start on: the one before it there must be done with.

        The sender may be ahead of the receiver, so what counts is the last use that the list promises.
        """
        self._need_slot(kind, t.axis, t.recv_slot)
        before = self.lands_in.get((kind, t.axis, t.recv_slot))
        if before is not None:
            if before.last_use >= self.step:
                self._fail(f"{t.payload} {t.index} overwrites {before.payload} {before.index}, still needed")
            onward = self.by_index.get((before.payload, before.index + 1))
            handed_on = onward is not None and onward.sent == before.index
            if t.inward and onward and handed_on and onward.number not in self.waited:
                self._fail(f"{t.payload} {t.index} overwrites {before.payload} {before.index}, being sent on")
            if not t.inward and before.number not in self.merged:
                self._fail(f"{t.payload} {t.index} overwrites {before.payload} {before.index}, not merged")
        self.lands_in[kind, t.axis, t.recv_slot] = t

    def _leave(self, t: Transfer) -> None:
        """A partial leaves once, if it holds anything: what comes to its line later would be missed at the
        end."""
        if t.sent == 0:
            self._fail(f"{t.payload} {t.index} sends away the own line")
        for rank in self.ranks:
            acc = rank.accs.get((t.axis, t.send_slot))
            if acc is None or acc.line != t.sent:
                self._fail(f"{t.payload} {t.index}: slot {t.send_slot} does not hold line #{t.sent}")
            if acc.gone or acc.sending is not None:
                self._fail(f"{t.payload} {t.index}: line #{t.sent} is sent twice")
            if self.hops_of[rank.number].sends(t) != (acc.parts != 0):
                self._fail(
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
                self._fail(f"{t.payload} {t.index}: rank {sender.number} does not send to {rank.number}")
            sends = self.hops_of[sender.number].sends(t)
            if sends != self.hops_of[rank.number].receives(t):
                who = f"rank {sender.number} {'sends' if sends else 'does not send'}"
                self._fail(f"{t.payload} {t.index}: {who}, rank {rank.number} thinks otherwise")
            sent = self.chunk[t.axis][sender.number][t.sent]
            if sends and t.inward and sender.chunks.get((t.axis, t.send_slot)) != sent:
                self._fail(f"{t.payload} {t.index}: slot {t.send_slot} does not hold #{t.sent}")
            expected = self.chunk[t.axis][rank.number][t.received]
            if sent != expected:
                self._fail(f"{t.payload} {t.index}: rank {rank.number} expects {expected}, gets {sent}")
            if not sends:
                arriving.append(None)
            else:
                arriving.append(sent if t.inward else sender.accs[t.axis, t.send_slot].parts)
                if t.inward and t.sent:
                    sender.used.add(self.by_index[t.payload, t.sent].number)
        for rank, content in zip(self.ranks, arriving, strict=True):
            slots = rank.chunks if t.inward else rank.partials
            slots.pop((t.axis, t.recv_slot), None)
            if content is not None:
                slots[t.axis, t.recv_slot] = content

    # Blocks

    def _sides(self, block: Block) -> Iterator[tuple[Axis, int, int]]:
        yield "row", block.row, block.row_slot
        yield "col", block.col, block.col_slot

    def _block(self, block: Block) -> None:
        name = f"block ({block.row}, {block.col})"
        if not (0 <= block.row < self.tile.a and 0 <= block.col < self.tile.b):
            self._fail(f"{name} is not in the tile")
        for axis, k, slot in self._sides(block):
            self._need_slot("chunk", axis, slot)
            if k:
                self._read(self._arrived(self.inward[axis], k))
        if "col" not in self.outward and block.col_acc != -1:
            self._fail(f"{name} of a forward list names a column accumulator")
        computed = self.computed.setdefault((block.row, block.col), set())
        if block.part in computed or len(computed) == block.parts or not 0 <= block.part < block.parts:
            self._fail(f"{name}: part {block.part} of {block.parts} is computed after {sorted(computed)}")
        computed.add(block.part)
        whole = len(computed) == block.parts  # only then it counts
        self._need_slot("acc", "row", block.row_acc)
        if "col" in self.outward:
            self._need_slot("acc", "col", block.col_acc)
        for rank in self.ranks:
            p, q = self.chunk["row"][rank.number][block.row], self.chunk["col"][rank.number][block.col]
            seen = self.visibility.sees(p, q)
            adds = seen and whole
            if seen and (
                rank.chunks.get(("row", block.row_slot)),
                rank.chunks.get(("col", block.col_slot)),
            ) != (p, q):
                self._fail(f"{name}: its slots do not hold the chunks {p} and {q} of rank {rank.number}")
            if self.assignment.owner(p, q) != rank.number:
                self._fail(f"{name}: rank {rank.number} does not own ({p}, {q})")
            row = self._accumulator(rank, "row", block.row_acc, block.row, first=True)
            self._add(rank, row, adds << q)
            if "col" in self.outward:
                col = self._accumulator(rank, "col", block.col_acc, block.col, first=True)
                self._add(rank, col, adds << p)
            if seen:
                received = [self.by_index[self.inward[axis], k] for axis, k, _ in self._sides(block) if k]
                rank.used.update(t.number for t in received)

    def _accumulator(self, rank: _Rank, axis: Axis, slot: int, line: int, *, first: bool) -> _Accumulator:
        """The accumulator of a line; a block may take the slot over from a line that has left."""
        acc = rank.accs.get((axis, slot))
        if acc is not None and acc.line == line and not acc.gone:
            return acc
        if not first:
            self._fail(f"accumulator slot {slot} of axis {axis} does not hold line #{line}")
        if acc is not None and not acc.gone:
            self._fail(f"line #{line} takes accumulator slot {slot} of axis {axis} from line #{acc.line}")
        if acc is not None and acc.line == line:
            self._fail(f"line #{line} of axis {axis} goes on after it was sent")
        new = _Accumulator(line)
        rank.accs[axis, slot] = new
        return new

    def _add(self, rank: _Rank, acc: _Accumulator, parts: int) -> None:
        if acc.sending is not None:
            self._fail(f"line #{acc.line} of rank {rank.number} changes while it is sent")
        if acc.parts & parts:
            self._fail(f"line #{acc.line} of rank {rank.number} gets a contribution twice")
        acc.parts |= parts

    # The end

    def _finish(self) -> None:
        self.step = len(self.schedule.steps)
        for t in self.started:
            if t.number not in self.waited:
                self._fail(f"{t.payload} {t.index} is never waited for")
            if t.last_use >= self.step:
                self._fail(f"{t.payload} {t.index} names a last use after the end, step {t.last_use}")
            if t.last_use != self.last_read.get(t.number):
                self._fail(f"{t.payload} {t.index} names step {t.last_use}, which does not read it, as last")
        for payload, hops in self.hops.items():
            if hops != self.tile.size(AXIS[payload]) - 1:
                self._fail(f"{payload} makes {hops} hops, not {self.tile.size(AXIS[payload]) - 1}")
        if len(self.computed) != self.tile.ranks:
            self._fail(f"each rank computes {len(self.computed)} of {self.tile.ranks} blocks")
        for rank in self.ranks:
            for t in self.started:
                if t.inward and self.hops_of[rank.number].receives(t) and t.number not in rank.used:
                    self._fail(f"rank {rank.number} receives {t.payload} {t.index} in vain")
            for axis in self.outward:
                own = rank.accs[axis, 0]
                if own.line != 0 or own.parts != self.visibility.line(axis, rank.number):
                    self._fail(f"rank {rank.number} ends with {own.parts.bit_count()} parts in its {axis} #0")
