"""What the ranks of a mesh do in one pass, with times and sizes: the input of the emulator.

A script is one list for all ranks, like the step lists that it is made of, in the order in which the engine
queues its work: kernels run one after the other, an exchange starts when the kernels before it have ended,
and a wait holds up the kernels behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from .cost import (
    NOMINAL,
    CallShape,
    Pace,
    accumulator_bytes,
    costs,
    message_bytes,
    payload_bytes,
    pays_to_share,
)
from .greedy import build
from .heads import head_groups, inner_shape
from .heads import message_bytes as head_message_bytes
from .hops import RINGS, Paths, Reach, Visibility
from .kernel_times import BlockPass, KernelTimes
from .placement import ORDER, Cut, MeshAxis, Placement
from .route import reach_of
from .schedule import INWARD, Block, Direction, Schedule, payloads
from .schedule import Transfer as ListTransfer
from .topology import Topology

PerRank = tuple[float, ...]
Slot = tuple[MeshAxis, int]
"""Of the chunks of an axis, by number."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Work of the GPU; microseconds, of each rank where they differ. ``steady`` work takes as long beside
    exchanges that take multiprocessors."""

    name: str
    us: float | PerRank
    steady: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """One message sent to the rank at ``offset`` along an axis, and one received from -``offset``.

    ``sends`` says which ranks send, where not all do. ``behind`` exchanges start with the one before and pay
    no latency of their own. Unless ``made``, what is sent was there at the start or came by an exchange that
    has been waited for, and copy engines need not wait for the kernels queued before, but for the `Free` of
    ``slot`` at the receiver, if there is one.
    """

    number: int
    name: str
    axis: MeshAxis
    offset: int
    num_bytes: int
    sends: tuple[bool, ...] | None = None
    behind: bool = False
    made: bool = True
    slot: Slot | None = None


@dataclass(frozen=True, slots=True)
class Free:
    """The kernels queued before were the last to use a slot that a later exchange fills again."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Wait:
    """For both halves of an exchange."""

    number: int


Entry = Kernel | Exchange | Wait | Free


@dataclass(frozen=True)
class Script:
    """One pass on all ranks. ``shares``: kernels leave room for exchanges that take multiprocessors, instead
    of waiting for their end."""

    name: str
    placement: Placement
    entries: tuple[Entry, ...]
    shares: bool

    @property
    def num_exchanges(self) -> int:
        return sum(isinstance(entry, Exchange) for entry in self.entries)


@dataclass(frozen=True)
class Mask:
    """Where blocks differ: what part of the pairs of query chunk p and key chunk q is visible, 0 to 1."""

    chunks: int
    part: Callable[[int, int], float]

    def visibility(self) -> Visibility:
        return Visibility(
            tuple(sum((self.part(p, q) > 0) << q for q in range(self.chunks)) for p in range(self.chunks))
        )


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
        reach = reach_of(cut.tile, mask.visibility())
        paths = reach.paths(message_bytes(direction, whole))
    placement = Placement(cut, order, topology.gpus_per_node, topology.gpus_per_nic, paths.turned)
    cost = costs(direction, whole, pace)
    if cut.heads > 1:
        cost = replace(cost, cut=None)  # a block in parts would fall into a part of the groups
    schedule = build(direction, cut.tile, cost, pace.channels, direct=paths.direct)
    maker = _Maker(schedule, inner, topology, placement, mask, reach, paths)
    if cut.heads == 1:
        entries = tuple(maker.entries(0))
    else:
        entries = tuple(_in_groups(direction, shape, cut.heads, groups, topology, maker))
    return Script(
        name=f"{direction}, {cut}, {', '.join(order)}",
        placement=placement,
        entries=entries,
        shares=pays_to_share(direction, whole, cut.tile, pace),
    )


def num_groups(shape: CallShape, cut: Cut, topology: Topology, order: tuple[MeshAxis, ...] = ORDER) -> int:
    """Into how many groups a mesh splits the heads of a rank: one where their exchange would take
    multiprocessors from the kernels that are to hide it."""
    if cut.heads == 1:
        return 1
    inside = "heads" in Placement(cut, order, topology.gpus_per_node).inside_axes
    link = topology.inside if inside else topology.across
    return 1 if link.sm_share else head_groups(shape, cut.heads)


def pace_of(topology: Topology, cut: Cut, order: tuple[MeshAxis, ...] = ORDER) -> Pace:
    """What lists should take links and kernels for on this cluster: a byte inside a node is the unit.

    Divisions and rounding alone, so that all ranks come to the same integers.
    """
    placement = Placement(cut, order, topology.gpus_per_node, topology.gpus_per_nic)

    def times(axis: MeshAxis) -> int:
        if axis in placement.inside_axes:
            return 1
        sharers = placement.sharers([(axis, -1)])
        across = topology.inside.gb_per_s / topology.across.gb_per_s
        return max(1, round(across * max(map(max, sharers))))

    inside = {axis in placement.inside_axes for axis in ("row", "col") if cut.size(axis) > 1}
    return Pace(
        flops_per_byte=max(1, round(topology.kernels.best_flops_per_us / (1e3 * topology.inside.gb_per_s))),
        row=times("row"),
        col=times("col"),
        channels="per_axis" if len(inside) == 2 else "shared",
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

    @cached_property
    def chunks(self) -> list[int]:
        """Of every rank."""
        return [self.placement.chunk(rank) for rank in range(self.placement.ranks)]

    def entries(self, first_number: int) -> Iterator[Entry]:
        """All of a pass; exchanges are numbered from ``first_number`` on."""
        shape, schedule, direction = self.shape, self.schedule, self.schedule.direction
        begun: set[tuple[str, int]] = set()
        started: set[bool] = set()
        placement = self.placement
        own, results = _own_bytes(direction, shape)
        yield self._memory("delta", own)
        for number, step in enumerate(schedule.steps):
            for waited in step.waits:
                yield Wait(first_number + waited)
            for merge in step.merges:
                # Reads both partials and writes one.
                moved = 2 * accumulator_bytes(merge.payload, shape) + payload_bytes(merge.payload, shape)
                yield self._memory(f"merge {merge.payload}", moved)
            for transfer in step.transfers:
                if not transfer.inward and shape.reduce_itemsize != shape.acc_itemsize:
                    payload = transfer.payload
                    moved = accumulator_bytes(payload, shape) + payload_bytes(payload, shape)
                    yield self._memory(f"cast {payload}", moved)
                exchange = self._exchange(transfer, first_number)
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
        assignment = self.placement.assignment
        parts = [
            self.mask.part(assignment.query_chunk(chunk, block.row), assignment.key_chunk(chunk, block.col))
            for chunk in self.chunks
        ]
        return Kernel(name, tuple(partial_us(part, half, whole) for part in parts))

    def _exchange(self, transfer: ListTransfer, first_number: int) -> Exchange:
        sends = None
        if self.reach is not None:
            reach, assignment, axis = self.reach, self.placement.assignment, transfer.axis
            sends = tuple(
                reach.takes_place(
                    axis,
                    assignment.chunk(chunk, axis, transfer.sent),
                    transfer.way,
                    transfer.index,
                    self.paths,
                )
                for chunk in self.chunks
            )
        return Exchange(
            number=first_number + transfer.number,
            name=f"{transfer.payload} {transfer.index}",
            axis=transfer.axis,
            offset=transfer.offset,
            num_bytes=payload_bytes(transfer.payload, self.shape),
            sends=sends,
            made=not transfer.inward,
            slot=(transfer.axis, transfer.recv_slot) if transfer.inward else None,
        )


def partial_us(part: float, half: float, whole: float) -> float:
    """Time of a block of which a part is visible, by a straight line through nothing, the half and all."""
    return 2 * part * half if part <= 0.5 else half + (2 * part - 1) * (whole - half)


def block_times(
    kernels: KernelTimes, shape: CallShape, parts: int = 1
) -> dict[BlockPass, tuple[float, float]]:
    """Microseconds of a block, or of one of its parts, half visible and all of it."""

    def us(what: BlockPass, causal: bool) -> float:
        return kernels.us(
            what,
            heads=shape.batch * shape.heads,
            kv_heads=shape.batch * shape.kv_heads,
            rows=shape.rows,
            keys=-(-shape.chunk_keys // parts),
            head_dim=max(shape.head_dim, shape.head_dim_v),
            causal=causal,
        )

    passes: tuple[BlockPass, ...] = ("forward", "merging", "backward", "adding")
    return {what: (us(what, True), us(what, False)) for what in passes}


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

    yield from start(0, "inward")
    for group in range(groups):
        yield from finish(group, "inward")
        if group + 1 < groups:
            yield from start(group + 1, "inward")
        yield from maker.entries(group * span)
        if group:
            yield from finish(group - 1, "outward")
        yield from start(group, "outward")
    yield from finish(groups - 1, "outward")
