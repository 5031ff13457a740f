"""Which hops of a list carry anything, where masks leave blocks empty, and which way round a ring they go.

All ranks run one list. A mask says for one rank which of its hops take place: an inward hop only if some rank
at or beyond its receiver computes with the chunk, an outward hop only if some rank up to its sender has
contributed to the line. Both ends of a hop come to the same answer, because they ask the same global facts
about the same chunk; ``check`` proves it for all pairs.

A chunk that few ranks need may lie near to them on one way round its ring and far on the other: the keys
before a window are needed by the next chunk, those of a document by its other ranks. So the ring of an axis
may be turned, for a pass, if that saves bytes.
"""

from __future__ import annotations

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


class Reach:
    """Where on its ring each chunk of a tile is needed.

    ``far[axis][c]`` is the last rank on the way of chunk c, counted from its owner to the left, that has a
    block to compute with it besides the owner, 0 if there is none; ``near[axis][c]`` is the first one, or the
    number of ranks of the ring. On a turned ring both are counted to the right.
    """

    def __init__(self, tile: Tile, visibility: Visibility) -> None:
        assert len(visibility.keys) == tile.ranks, f"{len(visibility.keys)} chunks, tile {tile}"
        self.tile = tile
        assignment = Assignment(tile)
        self._far: dict[Axis, list[int]] = {}
        self._near: dict[Axis, list[int]] = {}
        for axis in AXES:
            size = tile.size(axis)
            across = [
                assignment.keys(i) if axis == "row" else assignment.queries(i) for i in range(tile.ranks)
            ]
            work = [sum(1 << chunk for chunk in chunks) for chunks in across]
            needed = [
                [
                    m
                    for m in range(1, size)
                    if visibility.line(axis, chunk) & work[assignment.neighbour(chunk, axis, -m)]
                ]
                for chunk in range(tile.ranks)
            ]
            self._far[axis] = [max(ranks, default=0) for ranks in needed]
            self._near[axis] = [min(ranks, default=size) for ranks in needed]

    def inward(self, axis: Axis, chunk: int, turned: bool) -> int:
        """Hops of a chunk away from its owner: as far as the last rank that needs it."""
        return self.outward(axis, chunk, False) if turned else self._far[axis][chunk]

    def outward(self, axis: Axis, chunk: int, turned: bool) -> int:
        """Hops of a line home to its owner: from the first rank that has contributed."""
        if turned:
            return self._far[axis][chunk]
        return self.tile.size(axis) - self._near[axis][chunk]

    def num_hops(self, axis: Axis, way: Way, turned: bool = False) -> int:
        """Hops of all ranks together."""
        count = self.inward if way == "inward" else self.outward
        return sum(count(axis, chunk, turned) for chunk in range(self.tile.ranks))

    def turns(self, num_bytes: Mapping[tuple[Axis, Way], int]) -> frozenset[Axis]:
        """The axes whose rings are turned, because that saves bytes; ``num_bytes`` are those of a message."""

        def moved(axis: Axis, turned: bool) -> int:
            return sum(
                size * self.num_hops(axis, way, turned) for (on, way), size in num_bytes.items() if on == axis
            )

        return frozenset(axis for axis in AXES if moved(axis, True) < moved(axis, False))

    def hops(self, rank: int, turned: frozenset[Axis] = frozenset()) -> Hops:
        """The hops of one rank that take place."""
        assignment = Assignment(self.tile, turned)
        sent: set[Hop] = set()
        received: set[Hop] = set()
        for axis in AXES:
            for peer, hops in ((rank, sent), (assignment.neighbour(rank, axis, 1), received)):
                for k in range(1, self.tile.size(axis)):
                    # Inward hop k sends the chunk that the sender calls #(k-1), outward hop k its line #k.
                    chunk = assignment.chunk(peer, axis, k - 1)
                    if k <= self.inward(axis, chunk, axis in turned):
                        hops.add((axis, "inward", k))
                    line = assignment.chunk(peer, axis, k)
                    if k >= self.tile.size(axis) - self.outward(axis, line, axis in turned):
                        hops.add((axis, "outward", k))
        return Hops(frozenset(sent), frozenset(received))


def hops_of(tile: Tile, rank: int, visibility: Visibility, turned: frozenset[Axis] = frozenset()) -> Hops:
    """The hops of one rank, from facts that all ranks know."""
    return Reach(tile, visibility).hops(rank, turned)
