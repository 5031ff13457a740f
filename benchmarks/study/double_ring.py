"""A double ring for the emulator: keys and values go round the node, and from node to node beside that.

Not a step list of the library but what others run between nodes (LoongTrain's double ring): every GPU of a
node passes its chunk on inside the node, and once a round to the same GPU of the next node, so that all
network cards work. The bytes of a rank are those of a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from meshattn.plan.assignment import Tile
from meshattn.plan.block_cost import block_times
from meshattn.plan.cost import CallShape, accumulator_bytes, payload_bytes
from meshattn.plan.placement import Cut, Placement
from meshattn.plan.schedule import Direction
from meshattn.plan.script import Entry, Exchange, Kernel, Script, Wait
from meshattn.plan.topology import Topology


def double_ring(direction: Direction, shape: CallShape, ranks: int, topology: Topology) -> Script:
    """One pass of ``ranks`` ranks, whole nodes of them; partials of keys and values follow their chunk."""
    inner = min(topology.gpus_per_node, ranks)
    cut = Cut(1, Tile(inner, ranks // inner))
    placement = Placement(cut, ("row", "col", "heads"), topology.gpus_per_node, topology.gpus_per_nic)
    entries = tuple(_entries(direction, shape, cut.tile, topology))
    return Script(f"{direction}, double ring of {ranks}", placement, entries, room="all along")


def _entries(direction: Direction, shape: CallShape, tile: Tile, topology: Topology) -> Iterator[Entry]:
    half, whole = block_times(topology.kernels, shape)["merging" if direction == "forward" else "adding"]
    block = Kernel("block", half if shape.causal else whole)
    backward = direction == "backward"
    chunk, partial = payload_bytes("kv", shape), payload_bytes("dkv", shape)
    added = 2 * accumulator_bytes("dkv", shape) + partial
    merge = Kernel("merge dkv", added / (1e3 * topology.memory_gb_per_s), steady=True)
    numbers = count()
    waiting: int | None = None  # partials on their way to the next node
    for turn in range(tile.b):
        outer = next(numbers)
        last_turn = turn == tile.b - 1
        if not last_turn:
            yield Exchange(outer, f"kv {turn} out", "col", -1, chunk, made=False)
        behind: int | None = None  # partials on their way to the next GPU
        for place in range(tile.a):
            onward = next(numbers)
            if place < tile.a - 1:
                yield Exchange(onward, f"kv {turn}.{place}", "row", -1, chunk, made=False)
            yield block
            if behind is not None:
                yield Wait(behind)
                yield merge
                behind = None
            if backward and place < tile.a - 1:
                behind = next(numbers)
                yield Exchange(behind, f"dkv {turn}.{place}", "row", -1, partial)
            if place < tile.a - 1:
                yield Wait(onward)
        if behind is not None:
            yield Wait(behind)
            yield merge
        if waiting is not None:
            yield Wait(waiting)
            yield merge
            waiting = None
        if backward and not last_turn:
            waiting = next(numbers)
            yield Exchange(waiting, f"dkv {turn} out", "col", -1, partial)
        if not last_turn:
            yield Wait(outer)
    if waiting is not None:
        yield Wait(waiting)
        yield merge
