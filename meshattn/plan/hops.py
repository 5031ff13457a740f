"""Which hops of a list carry anything, where masks leave blocks empty, and which way round a ring they go.

All ranks run one list. A mask says for one rank which of its hops take place: an inward hop only if some rank
at or beyond its receiver computes with the chunk, an outward hop only if some rank up to its sender has
contributed to the line. Both ends of a hop come to the same answer, because they ask the same global facts
about the same chunk; ``check`` proves it for all pairs.

A chunk that few ranks need may lie near to them on one way round its ring and far on the other: the keys
before a window are needed by the next chunk, those of a document by its other ranks. So the ring of an axis
may be turned, for a pass, if that saves bytes; and where even then chunks pass through ranks that do not need
them, the axis is direct: nothing is handed on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .assignment import Assignment, Axis, Tile
from .schedule import Transfer, Way

AXES: tuple[Axis, Axis] = ("row", "col")
Hop = tuple[Axis, Way, int]  # the last is the index of the transfer, 1 .. n-1 on a ring of n ranks


@dataclass(frozen=True)
class Visibility:
    """Which blocks have anything to compute: bit q of ``keys[p]`` says that query chunk p sees key chunk
    q."""

    keys: tuple[int, ...]

    @classmethod
    def full(cls, chunks: int) -> Visibility:
        """Every query chunk sees every key chunk."""
        return cls(((1 << chunks) - 1,) * chunks)

    @cached_property
    def queries(self) -> tuple[int, ...]:
        """Bit p of ``queries[q]``: the same by key chunk."""
        chunks = range(len(self.keys))
        return tuple(sum((self.keys[p] >> q & 1) << p for p in chunks) for q in chunks)

    def line(self, axis: Axis, chunk: int) -> int:
        """Key chunks that a query chunk (row) sees, or query chunks that see a key chunk (col), as bits."""
        return self.keys[chunk] if axis == "row" else self.queries[chunk]

    def sees(self, p: int, q: int) -> bool:
        """Whether block (p, q) has anything to compute."""
        return bool(self.keys[p] >> q & 1)

    def __hash__(self) -> int:
        return self._hash  # looked up by it on every call

    @cached_property
    def _hash(self) -> int:
        return hash(self.keys)


@dataclass(frozen=True)
class Hops:
    """The hops that one rank sends and receives; all others do not take place for it."""

    sent: frozenset[Hop]
    received: frozenset[Hop]

    def sends(self, transfer: Transfer) -> bool:
        return (transfer.axis, transfer.way, transfer.index) in self.sent

    def receives(self, transfer: Transfer) -> bool:
        return (transfer.axis, transfer.way, transfer.index) in self.received


@dataclass(frozen=True)
class Paths:
    """How a pass moves things along each axis: round its ring to the left if nothing else is said."""

    turned: frozenset[Axis] = frozenset()
    direct: frozenset[Axis] = frozenset()


RINGS = Paths()


class Reach:
    """Where on its ring each chunk of a tile is needed.

    ``needed[axis][c]`` are the ranks besides the owner that have a block to compute with chunk c, by their
    distance to the left of the owner, rising.
    """

    def __init__(self, tile: Tile, visibility: Visibility) -> None:
        assert len(visibility.keys) == tile.ranks, f"{len(visibility.keys)} chunks, tile {tile}"
        self.tile = tile
        assignment = Assignment(tile)
        self._needed: dict[Axis, list[list[int]]] = {}
        for axis in AXES:
            across = [
                assignment.keys(i) if axis == "row" else assignment.queries(i) for i in range(tile.ranks)
            ]
            work = [sum(1 << chunk for chunk in chunks) for chunks in across]
            self._needed[axis] = [
                [
                    m
                    for m in range(1, tile.size(axis))
                    if visibility.line(axis, chunk) & work[assignment.neighbour(chunk, axis, -m)]
                ]
                for chunk in range(tile.ranks)
            ]

    def takes_place(self, axis: Axis, chunk: int, way: Way, index: int, paths: Paths = RINGS) -> bool:
        """Whether transfer ``index`` carries this chunk on, or its line home."""
        size, needed = self.tile.size(axis), self._needed[axis][chunk]
        if not needed:
            return False
        if axis in paths.direct:
            distance = size - index if axis in paths.turned else index
            at = bisect_left(needed, distance)
            return at < len(needed) and needed[at] == distance
        nearest, farthest = needed[0], needed[-1]
        if axis in paths.turned:
            nearest, farthest = size - farthest, size - nearest
        return index <= farthest if way == "inward" else index >= nearest

    def num_hops(self, axis: Axis, way: Way, paths: Paths = RINGS) -> int:
        """Hops of all ranks together."""
        size, needed = self.tile.size(axis), self._needed[axis]
        if axis in paths.direct:
            return sum(map(len, needed))
        outer = 0 if (way == "inward") == (axis in paths.turned) else -1  # the end of the list that counts
        ends = [chunk[outer] for chunk in needed if chunk]
        return sum(ends) if outer else sum(size - end for end in ends)

    def paths(self, num_bytes: Mapping[tuple[Axis, Way], int]) -> Paths:
        """The way that moves the fewest bytes along each axis: a ring, a turned ring, or direct where both
        move more; ``num_bytes`` are those of a message by axis and way."""
        turned: set[Axis] = set()
        direct: set[Axis] = set()
        for axis in AXES:
            sizes = [(way, size) for (on, way), size in num_bytes.items() if on == axis]
            only = frozenset((axis,))
            ring, other, straight = (
                sum(size * self.num_hops(axis, way, paths) for way, size in sizes)
                for paths in (RINGS, Paths(turned=only), Paths(direct=only))
            )
            if straight < min(ring, other):
                direct.add(axis)
            elif other < ring:
                turned.add(axis)
        return Paths(frozenset(turned), frozenset(direct))

    def hops(self, rank: int, paths: Paths = RINGS) -> Hops:
        """The hops of one rank that take place."""
        assignment = Assignment(self.tile, paths.turned)
        sent: set[Hop] = set()
        received: set[Hop] = set()
        for axis in AXES:
            for k in range(1, self.tile.size(axis)):
                # What the sender calls the chunk that transfer k carries, and at which offset it stands.
                flows: tuple[tuple[Way, int, int], ...] = (("inward", k - 1, 1), ("outward", k, 1))
                if axis in paths.direct:
                    flows = ("inward", 0, k), ("outward", k, -k)
                for way, number, offset in flows:
                    source = assignment.neighbour(rank, axis, offset)
                    for sender, hops in ((rank, sent), (source, received)):
                        if self.takes_place(axis, assignment.chunk(sender, axis, number), way, k, paths):
                            hops.add((axis, way, k))
        return Hops(frozenset(sent), frozenset(received))


def hops_of(tile: Tile, rank: int, visibility: Visibility, paths: Paths = RINGS) -> Hops:
    """The hops of one rank, from facts that all ranks know."""
    return Reach(tile, visibility).hops(rank, paths)
