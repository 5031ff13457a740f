"""An attention call as one rank sees it: its step lists, with whom it exchanges what, which blocks have
anything to compute, and how its tensors travel.

All of it follows from the call, so it is worked out once, before the first pass, and not in every one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from meshattn.dropout import DropoutRule
from meshattn.packing import Field, Packing
from meshattn.plan.assignment import Assignment, Axis
from meshattn.plan.hops import Hops
from meshattn.plan.schedule import AXIS, Block, Costs, Merge, Payload, Schedule, Transfer
from meshattn.recording import Recorder
from meshattn.transport.base import Message, Transport
from meshattn_kernels import AttentionKernel, Intervals
from meshattn_kernels.contract import ACCUMULATOR_KINDS, AccumulatorKind, ChunkSizes, Shapes, rows_first
from meshattn_kernels.sharing import heads_of, of_part


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer of the list as this rank takes part in it."""

    transfer: Transfer
    transport: Transport
    message: Message
    sends: bool
    receives: bool


@dataclass(frozen=True, slots=True)
class Work:
    """A step of the list; see `plan.schedule.Step` for the order in it."""

    waits: tuple[int, ...]
    merges: tuple[Merge, ...]  # of what has arrived
    moves: tuple[Move, ...]
    beside: tuple[Transport, ...]  # that move something now, beside the blocks of this step
    blocks: tuple[tuple[Block, Intervals, AttentionKernel], ...]  # that are not empty
    releases: tuple[int, ...]  # transfers whose receive slot is not needed any more


@dataclass(frozen=True, eq=False)
class Program:
    """What one pass does on one rank."""

    rank: int  # the chunk that is this rank's own
    owners: tuple[int, ...]  # the mesh rank of each chunk
    schedule: Schedule
    assignment: Assignment  # which way round its rings it goes
    hops: Hops  # the transfers of the list that take place for this rank
    transports: Mapping[str, Transport]  # by axis
    intervals: Callable[[int, int], Intervals]  # of (query chunk, key chunk)
    kernel: AttentionKernel
    beside: Callable[[int, int], AttentionKernel]
    """The kernel for a block beside transfers that take multiprocessors: of the costs of what is still to
    move and of the block."""
    costs: Costs

    @cached_property
    def steps(self) -> tuple[Work, ...]:
        """The steps of the list, in order."""
        crowding: dict[int, int] = {}  # what is left of transfers that take multiprocessors, by number
        arrived: set[int] = set()
        releases: dict[int, list[int]] = {}
        steps = []
        for number, step in enumerate(self.schedule.steps):
            for waited in step.waits:
                crowding.pop(waited, None)
            merges = tuple(merge for merge in step.merges if merge.transfer in arrived)
            moves = tuple(self._move(number, transfer) for transfer in step.transfers)
            for move in moves:
                releases.setdefault(move.transfer.last_use, []).append(move.transfer.number)
                if move.receives:
                    arrived.add(move.transfer.number)
                if move.transport.multiprocessors and (move.sends or move.receives):
                    crowding[move.transfer.number] = self.costs.of(move.transfer.payload)
            blocks: list[tuple[Block, Intervals, AttentionKernel]] = []
            for block in step.blocks:
                intervals = self.intervals(*self.chunks(block))
                if intervals.is_empty:
                    continue
                cost = self.costs.of_block(block.parts)
                kernel = self.beside(max(crowding.values()), cost) if crowding else self.kernel
                crowding = {number: left - cost for number, left in crowding.items()}
                blocks.append((block, intervals, of_part(kernel, block.part, block.parts)))
            moving = dict.fromkeys(move.transport for move in moves if move.sends or move.receives)
            steps.append(
                Work(
                    waits=step.waits,
                    merges=merges,
                    moves=moves,
                    beside=tuple(moving) if blocks else (),
                    blocks=tuple(blocks),
                    releases=tuple(releases.pop(number, ())),
                )
            )
        assert not releases, f"transfers {sorted(releases.values())} are never released"
        return tuple(steps)

    @cached_property
    def moving(self) -> tuple[Transport, ...]:
        """What moves anything for this rank."""
        moves = (move for step in self.steps for move in step.moves if move.sends or move.receives)
        return tuple(dict.fromkeys(move.transport for move in moves))

    @cached_property
    def last_merges(self) -> Mapping[str, int]:
        """By payload, the transfer whose partial is merged last of all, if it goes into the own line."""
        last = {merge.payload: merge for step in self.steps for merge in step.merges}
        return {payload: merge.transfer for payload, merge in last.items() if merge.index == 0}

    def _move(self, step: int, transfer: Transfer) -> Move:
        schedule, neighbour = self.schedule, self.assignment.neighbour
        where = f"{schedule.direction} step {step}/{len(schedule.steps)}"
        message = Message(
            phase=schedule.direction,
            axis=transfer.axis,
            flow=transfer.way,
            label=f"{where}, {transfer.payload} #{transfer.index}",
            to=self.owners[neighbour(self.rank, transfer.axis, transfer.offset)],
            source=self.owners[neighbour(self.rank, transfer.axis, -transfer.offset)],
            slot=transfer.recv_slot - 1 if transfer.inward else transfer.recv_slot,
            made=not transfer.inward,
            again=transfer.number in self._refilled,
        )
        sends, receives = self.hops.sends(transfer), self.hops.receives(transfer)
        return Move(transfer, self.transports[transfer.axis], message, sends, receives)

    @cached_property
    def _refilled(self) -> frozenset[int]:
        """Transfers whose chunk slot is filled again by a later one."""
        slots: dict[tuple[str, int], list[int]] = {}
        for transfer in self.schedule.transfers:
            if transfer.inward:
                slots.setdefault((transfer.axis, transfer.recv_slot), []).append(transfer.number)
        return frozenset(number for users in slots.values() for number in users[:-1])

    def chunks(self, block: Block) -> tuple[int, int]:
        """Query and key chunk of a block."""
        queries = self.assignment.query_chunk(self.rank, block.row)
        return queries, self.assignment.key_chunk(self.rank, block.col)


@dataclass(frozen=True)
class Line:
    """The accumulators of one kind in one pass: how many are live at once, and how they lie and travel."""

    kind: AccumulatorKind
    axis: Axis
    transport: Transport
    held: int
    received: int  # buffers for those that arrive
    packing: Packing
    wire: Packing  # how they travel: the same one if that is the same
    results: Packing | None  # what they become; None if the kernel writes that itself
    last: int | None  # the transfer whose partial is added when the line is finished
    lonely: bool  # nothing but parts of the own block is added to the own line until they are done
    later: Mapping[str, tuple[int, int]]  # dim of the heads, and the first that part 0 of it leaves to others


@dataclass(frozen=True)
class Call:
    """What both passes of one attention call share on one rank; no tensors."""

    forward: Program
    backward: Program | None  # None where no gradient is wanted
    kernel: AttentionKernel
    dropout: DropoutRule | None
    batch: int
    rows: int
    key_rows: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    accumulator_dtype: torch.dtype
    reduce_dtype: torch.dtype
    dkv_dtype: torch.dtype  # of dk and dv: a part of them is to be added to others
    softmax_scale: float
    device: torch.device
    recorder: Recorder | None = None  # of passes that recur

    def result_dtype(self, kind: AccumulatorKind) -> torch.dtype:
        """Type of the results of a kind of accumulator."""
        return self.dkv_dtype if kind == "dkv" else self.dtype

    @cached_property
    def chunk_packings(self) -> Mapping[Payload, Packing]:
        """How the chunks of each inward payload travel."""
        rows, keys = (self.batch, self.rows, self.heads), (self.batch, self.key_rows, self.kv_heads)
        q, do = (Field(name, (*rows, dim), self.dtype) for name, dim in self._dims("q", "do"))
        kv = (Field(name, (*keys, dim), self.dtype) for name, dim in self._dims("k", "v"))
        per_row = self.batch, self.heads, self.rows
        lse, delta = (Field(name, per_row, self.accumulator_dtype) for name in ("lse", "delta"))
        return {"q": Packing((q,)), "kv": Packing(tuple(kv)), "bundle": Packing((q, do, lse, delta))}

    def _dims(self, *names: str) -> tuple[tuple[str, int], ...]:
        return tuple(zip(names, (self.head_dim, self.head_dim_v), strict=True))

    @cached_property
    def lines(self) -> Mapping[AccumulatorKind, Line]:
        """The accumulators of each kind."""
        programs = {kind: self.forward if kind == "out" else self.backward for kind in ACCUMULATOR_KINDS}
        return {kind: self._line(kind, program) for kind, program in programs.items() if program is not None}

    def _line(self, kind: AccumulatorKind, program: Program) -> Line:
        axis, slots, tile = AXIS[kind], program.schedule.slots, program.schedule.tile
        by_row = axis == "row"
        held, received = (slots.row_acc, slots.row_recv) if by_row else (slots.col_acc, slots.col_recv)
        packing, wire, results = self._packings(kind)
        return Line(
            kind=kind,
            axis=axis,
            transport=program.transports[axis],
            held=held,
            received=received,
            packing=packing,
            wire=wire,
            results=results,
            last=None if kind == "out" else program.last_merges.get(kind),
            lonely=tile.size("col" if by_row else "row") == 1 and axis not in program.schedule.direct,
            later=self._later_heads(kind, packing, max(block.parts for block in program.schedule.blocks)),
        )

    def _later_heads(
        self, kind: AccumulatorKind, whole: Packing, parts: int
    ) -> Mapping[str, tuple[int, int]]:
        kv_heads = len(heads_of(self.kv_heads, (0, parts)))
        sizes = self._sizes(kind, kv_heads * self.heads // self.kv_heads, kv_heads)
        of_part_0 = self.kernel.accumulator_shapes(kind, **sizes)
        return {
            field.name: (dim, size)
            for field in whole.fields
            for dim, size in enumerate(of_part_0[field.name])
            if size != field.shape[dim]
        }

    def _sizes(self, kind: AccumulatorKind, heads: int, kv_heads: int) -> ChunkSizes:
        return {
            "batch": self.batch,
            "rows": self.key_rows if kind == "dkv" else self.rows,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
        }

    def _packings(self, kind: AccumulatorKind) -> tuple[Packing, Packing, Packing | None]:
        """How accumulators of a kind lie and travel, and their results."""

        def packed(shapes: Shapes, dtype: torch.dtype) -> Packing:
            # lse always moves in full: rounding it would scale whole rows.
            types = {name: self.accumulator_dtype if name == "lse" else dtype for name in shapes}
            return Packing(tuple(Field(name, shape, types[name]) for name, shape in shapes.items()))

        sizes = self._sizes(kind, self.heads, self.kv_heads)
        shapes = self.kernel.accumulator_shapes(kind, **sizes)
        # On a tile of one rank one block is all that is ever added.
        alone = self.forward.schedule.tile.ranks == 1 and kind in self.kernel.writes_finished
        # Kernels take memory of the accumulator type for accumulators, and leave dq and dk in it unscaled.
        alone &= self.result_dtype(kind) == self.dtype != self.accumulator_dtype
        held, sent = self.dtype if alone else self.accumulator_dtype, self.reduce_dtype
        mine = packed(shapes, held)
        wire = mine if held == sent else packed(shapes, sent)
        return mine, wire, None if alone else packed(rows_first(kind, **sizes), self.result_dtype(kind))
