"""A step list as one rank executes it: with whom it exchanges what, and which blocks have anything to
compute.

All of it follows from the call, so it is worked out once, before the first pass, and not in every one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from meshattn.plan.assignment import Assignment
from meshattn.plan.hops import Hops
from meshattn.plan.schedule import Block, Merge, Schedule, Transfer
from meshattn.transport.base import Message, Transport
from meshattn_kernels import AttentionKernel, Intervals
from meshattn_kernels.sharing import of_part


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


@dataclass(frozen=True)
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
    crowded_kernel: AttentionKernel  # for blocks beside transfers that take multiprocessors

    @cached_property
    def steps(self) -> tuple[Work, ...]:
        """The steps of the list, in order."""
        crowding: set[int] = set()  # transfers under way that take multiprocessors from the kernels
        arrived: set[int] = set()
        releases: dict[int, list[int]] = {}
        steps = []
        for number, step in enumerate(self.schedule.steps):
            crowding.difference_update(step.waits)
            merges = tuple(merge for merge in step.merges if merge.transfer in arrived)
            moves = tuple(self._move(number, transfer) for transfer in step.transfers)
            for move in moves:
                releases.setdefault(move.transfer.last_use, []).append(move.transfer.number)
                if move.receives:
                    arrived.add(move.transfer.number)
                if move.transport.multiprocessors and (move.sends or move.receives):
                    crowding.add(move.transfer.number)
            kernel = self.crowded_kernel if crowding else self.kernel
            masks = [(block, self.intervals(*self.chunks(block))) for block in step.blocks]
            blocks = tuple(
                (block, intervals, of_part(kernel, block.part, block.parts))
                for block, intervals in masks
                if not intervals.is_empty
            )
            moving = dict.fromkeys(move.transport for move in moves if move.sends or move.receives)
            steps.append(
                Work(
                    waits=step.waits,
                    merges=merges,
                    moves=moves,
                    beside=tuple(moving) if blocks else (),
                    blocks=blocks,
                    releases=tuple(releases.pop(number, ())),
                )
            )
        assert not releases, f"transfers {sorted(releases.values())} are never released"
        return tuple(steps)

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
        )
        sends, receives = self.hops.sends(transfer), self.hops.receives(transfer)
        return Move(transfer, self.transports[transfer.axis], message, sends, receives)

    def chunks(self, block: Block) -> tuple[int, int]:
        """Query and key chunk of a block."""
        queries = self.assignment.query_chunk(self.rank, block.row)
        return queries, self.assignment.key_chunk(self.rank, block.col)
