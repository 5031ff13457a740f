"""Which hops of a list carry anything, where masks leave blocks empty.

All ranks run one list. A mask says for one rank which of its hops take place: an inward hop only if some rank
at or beyond its receiver computes with the chunk, an outward hop only if some rank up to its sender has
contributed to the line. Both ends of a hop come to the same answer, because they ask the same global facts
about the same chunk; ``check`` proves it for all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .assignment import Assignment, Axis, Tile
from .schedule import Transfer, Way

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


@dataclass(frozen=True)
class Hops:
    """The hops that one rank sends and receives; all others do not take place for it."""

    sent: frozenset[Hop]
    received: frozenset[Hop]

    def sends(self, transfer: Transfer) -> bool:
        return (transfer.axis, transfer.way, transfer.index) in self.sent

    def receives(self, transfer: Transfer) -> bool:
        return (transfer.axis, transfer.way, transfer.index) in self.received


@lru_cache(maxsize=1024)
def hops_of(tile: Tile, rank: int, visibility: Visibility) -> Hops:
    """The hops of one rank, from facts that all ranks know."""
    assert len(visibility.keys) == tile.ranks, f"{len(visibility.keys)} chunks, tile {tile}"
    facts = _Facts(tile, visibility)
    sent = frozenset(hop for hop in _every_hop(tile) if facts.takes_place(rank, hop))
    right = {axis: facts.assignment.neighbour(rank, axis, 1) for axis in _AXES}
    received = frozenset(hop for hop in _every_hop(tile) if facts.takes_place(right[hop[0]], hop))
    return Hops(sent, received)


_AXES: tuple[Axis, Axis] = ("row", "col")
_WAYS: tuple[Way, Way] = ("inward", "outward")


def _every_hop(tile: Tile) -> Iterator[Hop]:
    for axis in _AXES:
        for way in _WAYS:
            for index in range(1, tile.size(axis)):
                yield axis, way, index


class _Facts:
    def __init__(self, tile: Tile, visibility: Visibility) -> None:
        self.assignment = Assignment(tile)
        self.tile = tile
        self.visibility = visibility
        self.known: dict[tuple[int, Axis, int], bool] = {}

    def takes_place(self, sender: int, hop: Hop) -> bool:
        """Whether a rank sends a hop: of the chunk that it calls #(k-1) inward, of its line #k outward.

        On its way left a chunk or line has another number on every rank: one more with every hop.
        """
        axis, way, k = hop
        at = self.assignment.neighbour
        if way == "inward":
            beyond = range(k, self.tile.size(axis))
            return any(self._works_with(at(sender, axis, k - 1 - m), axis, m) for m in beyond)
        return any(self._works_with(at(sender, axis, k - m), axis, m) for m in range(1, k + 1))

    def _works_with(self, rank: int, axis: Axis, k: int) -> bool:
        """Whether a rank has a block to compute in its row or column #k."""
        key = (rank, axis, k)
        if key not in self.known:
            if axis == "row":
                chunk, across = self.assignment.query_chunk(rank, k), self.assignment.keys(rank)
            else:
                chunk, across = self.assignment.key_chunk(rank, k), self.assignment.queries(rank)
            line = self.visibility.line(axis, chunk)
            self.known[key] = any(line >> other & 1 for other in across)
        return self.known[key]
