"""The script of a pass, made of its step list: every transfer with its bytes, every block with its time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from .assignment import Axis
from .block_cost import Mask, block_times, partial_us
from .cost import (
    NOMINAL,
    CallShape,
    Pace,
    accumulator_bytes,
    costs,
    message_bytes,
    payload_bytes,
    room_for,
)
from .greedy import build
from .heads import inner_shape
from .heads import message_bytes as head_message_bytes
from .hops import AXES, RINGS, Paths, Reach
from .kernel_times import BlockPass
from .pace import num_groups
from .placement import ORDER, Cut, MeshAxis, Placement
from .route import reach_of
from .schedule import INWARD, Block, Direction, Schedule, Transfer, payloads
from .script import Entry, Exchange, Free, Kernel, Script, Slot, Wait
from .topology import Topology

T = TypeVar("T")


def pass_script(
    direction: Direction,
    shape: CallShape,
    cut: Cut,
    topology: Topology,
    *,
    order: tuple[MeshAxis, ...] = ORDER,
    mask: Mask | None = None,
    pace: Pace = NOMINAL,
) -> Script:
    """The script of a call, ``shape`` as outside: ``rows`` of a rank, all heads.

    Without ``mask`` all blocks cost the same, half of a square if the shape is causal (causal striping).
    """
    groups = num_groups(shape, cut, topology, order)
    inner = inner_shape(shape, cut.heads, groups) if cut.heads > 1 else shape
    whole = inner_shape(shape, cut.heads) if cut.heads > 1 else shape  # lists do not depend on groups
    paths, reach = RINGS, None
    if mask is not None:
        reach = reach_of(cut.tile, mask.visibility)
        paths = reach.paths(message_bytes(direction, whole))
    placement = Placement(cut, order, topology.gpus_per_node, topology.gpus_per_nic, paths.turned)
    cost = costs(direction, whole, pace)
    if cut.heads > 1:
        cost = replace(cost, cut=None)  # a block in parts would fall into a part of the groups
    schedule = build(direction, cut.tile, cost, pace.channels, direct=paths.direct)
    maker = _Maker(schedule, inner, topology, placement, mask, reach, paths)
    if cut.heads == 1:
        entries = tuple(maker.entries())
    else:
        entries = tuple(_in_groups(direction, shape, cut.heads, groups, topology, maker))
    return Script(
        name=f"{direction}, {cut}, {', '.join(order)}",
        placement=placement,
        entries=entries,
        room=room_for(direction, whole, cut.tile, pace),
    )


class _Maker:
    """Turns a step list into entries."""

    def __init__(
        self,
        schedule: Schedule,
        shape: CallShape,
        topology: Topology,
        placement: Placement,
        mask: Mask | None,
        reach: Reach | None,
        paths: Paths,
    ) -> None:
        self.schedule = schedule
        self.shape = shape
        self.topology = topology
        self.placement = placement
        self.mask = mask
        self.reach = reach
        self.paths = paths
        self.times = {parts: block_times(topology.kernels, shape, parts) for parts in (1, 2)}

    def _of_ranks(self, of_chunks: Sequence[T]) -> tuple[T, ...]:
        """By rank what is given by the chunk that it owns."""
        return tuple(of_chunks[chunk] for chunk in self._chunks)

    @cached_property
    def _named(self) -> dict[Axis, list[list[int]]]:
        """By axis, k and chunk the chunk that its owner calls #k."""
        tile, chunk = self.placement.cut.tile, self.placement.assignment.chunk
        return {
            axis: [[chunk(i, axis, k) for i in range(tile.ranks)] for k in range(tile.size(axis))]
            for axis in AXES
        }

    @cached_property
    def _chunks(self) -> list[int]:
        """Of every rank."""
        return [self.placement.chunk(rank) for rank in range(self.placement.ranks)]

    def entries(self) -> Iterator[Entry]:
        """All of a pass; exchanges have the numbers of the list."""
        shape, schedule, direction = self.shape, self.schedule, self.schedule.direction
        begun: set[tuple[str, int]] = set()
        started: set[bool] = set()
        placement = self.placement
        own, results = _own_bytes(direction, shape)
        yield self._memory("delta", own)
        for number, step in enumerate(schedule.steps):
            for waited in step.waits:
                yield Wait(waited)
            for merge in step.merges:
                # Reads both partials and writes one.
                moved = 2 * accumulator_bytes(merge.payload, shape) + payload_bytes(merge.payload, shape)
                yield self._memory(f"merge {merge.payload}", moved)
            for transfer in step.transfers:
                if not transfer.inward and shape.reduce_itemsize != shape.acc_itemsize:
                    payload = transfer.payload
                    moved = accumulator_bytes(payload, shape) + payload_bytes(payload, shape)
                    yield self._memory(f"cast {payload}", moved)
                exchange = self._exchange(transfer)
                inside = transfer.axis in placement.inside_axes
                # The first one waits for what stood there before the pass.
                yield exchange if inside in started else replace(exchange, made=True)
                started.add(inside)
            for block in step.blocks:
                lines = [("row", block.row)] + ([("col", block.col)] if direction == "backward" else [])
                added = any(line in begun for line in lines)
                begun.update(lines)
                yield self._block(block, added)
            yield from map(Free, self._freed[number])
        yield self._memory("finish", results)

    @cached_property
    def _freed(self) -> list[list[Slot]]:
        """By step: slots that were used for the last time and are filled again."""
        freed: list[list[Slot]] = [[] for _ in self.schedule.steps]
        last: dict[Slot, int] = {}
        for transfer in self.schedule.transfers:
            if transfer.inward:
                slot: Slot = transfer.axis, transfer.recv_slot
                if slot in last:
                    freed[last[slot]].append(slot)
                last[slot] = transfer.last_use
        return freed

    def _memory(self, name: str, num_bytes: int) -> Kernel:
        return Kernel(name, num_bytes / (1e3 * self.topology.memory_gb_per_s), steady=True)

    def _block(self, block: Block, added: bool) -> Kernel:
        forward = self.schedule.direction == "forward"
        what: BlockPass = (
            ("merging" if added else "forward") if forward else "adding" if added else "backward"
        )
        half, whole = self.times[block.parts][what]
        name = f"block {block.row} {block.col}"
        if self.mask is None:
            return Kernel(name, half if self.shape.causal else whole)
        pairs = zip(self._named["row"][block.row], self._named["col"][block.col], strict=True)
        parts = self.mask.parts
        return Kernel(name, self._of_ranks([partial_us(parts[p][q], half, whole) for p, q in pairs]))

    def _exchange(self, transfer: Transfer) -> Exchange:
        sends = None
        if self.reach is not None:
            axis, way, index = transfer.axis, transfer.way, transfer.index
            moved = self._named[axis][transfer.sent]
            sends = self._of_ranks(
                [self.reach.takes_place(axis, chunk, way, index, self.paths) for chunk in moved]
            )
        return Exchange(
            number=transfer.number,
            name=f"{transfer.payload} {transfer.index}",
            axis=transfer.axis,
            offset=transfer.offset,
            num_bytes=payload_bytes(transfer.payload, self.shape),
            sends=sends,
            made=not transfer.inward,
            slot=(transfer.axis, transfer.recv_slot) if transfer.inward else None,
        )


def _own_bytes(direction: Direction, shape: CallShape) -> tuple[int, int]:
    """Bytes read and written before the first block and after the last: delta; results cast."""
    plain = replace(shape, reduce_itemsize=shape.itemsize)
    results = [payload for payload in payloads(direction) if payload not in INWARD]
    after = sum(accumulator_bytes(payload, shape) + payload_bytes(payload, plain) for payload in results)
    before = 2 * shape.query_rows * shape.head_dim_v * shape.itemsize if direction == "backward" else 0
    return before, after


def _in_groups(
    direction: Direction,
    shape: CallShape,
    ranks: int,
    groups: int,
    topology: Topology,
    maker: _Maker,
) -> Iterator[Entry]:
    """The engine's entries for one group of heads after the other, and the exchanges of heads around them:
    while a group is computed the next comes in and the one before goes out."""
    sizes = head_message_bytes(direction, shape, ranks, groups)
    span = maker.schedule.num_transfers + 2 * (ranks - 1)
    rate = 1e3 * topology.memory_gb_per_s

    def numbers(group: int, way: str) -> range:
        first = group * span + maker.schedule.num_transfers + (ranks - 1 if way == "outward" else 0)
        return range(first, first + ranks - 1)

    def copies(name: str, way: str) -> Kernel:
        num_bytes = sizes["inward" if way == "inward" else "outward"] * ranks
        return Kernel(name, 2 * num_bytes / rate, steady=True)

    def start(group: int, way: str) -> Iterator[Entry]:
        yield copies("pack heads", way)
        for place, number in enumerate(numbers(group, way)):
            size = sizes["inward" if way == "inward" else "outward"]
            yield Exchange(number, f"heads {way}", "heads", place + 1, size, behind=place > 0)

    def finish(group: int, way: str) -> Iterator[Entry]:
        yield from map(Wait, numbers(group, way))
        yield copies("join heads", way)

    computed = tuple(maker.entries())  # of every group
    yield from start(0, "inward")
    for group in range(groups):
        yield from finish(group, "inward")
        if group + 1 < groups:
            yield from start(group + 1, "inward")
        yield from _renumbered(computed, group * span)
        if group:
            yield from finish(group - 1, "outward")
        yield from start(group, "outward")
    yield from finish(groups - 1, "outward")


def _renumbered(entries: Iterable[Entry], first: int) -> Iterator[Entry]:
    """With exchanges numbered from ``first`` on."""
    for entry in entries:
        if isinstance(entry, Exchange):
            yield replace(entry, number=first + entry.number)
        else:
            yield Wait(first + entry.number) if isinstance(entry, Wait) else entry
