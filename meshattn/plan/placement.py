"""Where the ranks of a mesh sit: which GPU of which node, and which hops leave it.

A cut is heads x a x b. The ranks of one of its axes are neighbours if the axis comes first in the order; the
library's own order is heads, row, col, and another order of the ranks is another order of the list that a
mesh is built on. Ranks are numbered by GPU, node by node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import lcm
from typing import Literal

from .assignment import Assignment, Axis, Tile

MeshAxis = Literal["heads", "row", "col"]
ORDER: tuple[MeshAxis, MeshAxis, MeshAxis] = ("heads", "row", "col")


@dataclass(frozen=True, order=True)
class Cut:
    """How attention is cut: ``heads`` ranks by heads, and each of these by a tile."""

    heads: int
    tile: Tile

    @property
    def ranks(self) -> int:
        return self.heads * self.tile.ranks

    def size(self, axis: MeshAxis) -> int:
        return self.heads if axis == "heads" else self.tile.size(axis)

    def orders(self, gpus_per_node: int) -> tuple[tuple[MeshAxis, ...], ...]:
        """Orders that differ, the library's own first; axes of one rank stand last."""
        moving = [axis for axis in ORDER if self.size(axis) > 1]
        still = [axis for axis in ORDER if self.size(axis) == 1]
        if self.ranks <= gpus_per_node:
            return ((*moving, *still),)
        return tuple((*order, *still) for order in permutations(moving))

    def __str__(self) -> str:
        return f"{self.heads}x{self.tile}"


@dataclass(frozen=True)
class Placement:
    """A cut on nodes of ``gpus_per_node`` GPUs, its axes in ``order``, neighbours first."""

    cut: Cut
    order: tuple[MeshAxis, ...]
    gpus_per_node: int
    gpus_per_nic: int = 1
    turned: frozenset[Axis] = frozenset()

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(ORDER):
            raise ValueError(f"order is {', '.join(self.order)}, but must name heads, row and col once each")

    @property
    def ranks(self) -> int:
        return self.cut.ranks

    @cached_property
    def assignment(self) -> Assignment:
        return Assignment(self.cut.tile, self.turned)

    @cached_property
    def _strides(self) -> dict[MeshAxis, int]:
        strides, stride = {}, 1
        for axis in self.order:
            strides[axis] = stride
            stride *= self.cut.size(axis)
        return strides

    def coordinate(self, rank: int, axis: MeshAxis) -> int:
        return rank // self._strides[axis] % self.cut.size(axis)

    @cached_property
    def group(self) -> tuple[int, ...]:
        """The ranks, numbered node by node, in the order of the mesh: what to build it on."""
        heads = self.cut.heads
        return tuple(
            sorted(range(self.ranks), key=lambda r: self.chunk(r) * heads + self.coordinate(r, "heads"))
        )

    def chunk(self, rank: int) -> int:
        """The chunk that a rank owns, as the tile counts."""
        return self.coordinate(rank, "col") * self.cut.tile.a + self.coordinate(rank, "row")

    @cached_property
    def period(self) -> int:
        """Ranks so far apart are placed alike: rank r + n * period is what rank r is, nodes further on.

        To go round an axis, and round those outside of it, by a multiple of whole nodes puts nodes upon nodes
        and peers upon peers. Where nodes are not filled so, it is the number of ranks.
        """
        for axis in self.order:
            stride = self._strides[axis]
            period = lcm(stride, self.gpus_per_node)
            if stride * self.cut.size(axis) % period == 0:
                return period
        return self.ranks

    def peers(self, axis: MeshAxis, offset: int, first: int | None = None) -> tuple[int, ...]:
        """For each rank, or of the ``first`` ones, the one at ``offset`` along an axis."""
        step = -offset if axis in self.turned else offset
        size, stride = self.cut.size(axis), self._strides[axis]
        moves = [((at + step) % size - at) * stride for at in range(size)]
        ranks = range(self.ranks if first is None else first)
        return tuple(rank + moves[rank // stride % size] for rank in ranks)

    def node(self, rank: int) -> int:
        return rank // self.gpus_per_node

    def card(self, rank: int) -> tuple[int, int]:
        """Node and network card of a rank."""
        return self.node(rank), rank % self.gpus_per_node // self.gpus_per_nic

    @cached_property
    def inside_axes(self) -> frozenset[MeshAxis]:
        """Axes along which no exchange leaves a node."""
        return frozenset(
            axis
            for axis in ORDER
            if all(
                self.node(rank) == self.node(peer)
                for rank, peer in enumerate(self.peers(axis, 1, self.period))
            )
        )

    def sharers(self, ways: Sequence[tuple[MeshAxis, int]]) -> tuple[list[int], list[int]]:
        """For each rank of a period how many on its network card send to another node by one of these (axis,
        offset), and how many receive."""
        senders, receivers = (
            {
                rank
                for axis, offset in ways
                for rank, peer in enumerate(self.peers(axis, sign * offset, self.period))
                if self.node(rank) != self.node(peer)
            }
            for sign in (1, -1)
        )
        cards = list(map(self.card, range(self.period)))
        counts = [Counter(cards[rank] for rank in some) for some in (senders, receivers)]
        sending, receiving = ([count[card] for card in cards] for count in counts)
        return sending, receiving

    def describe(self) -> str:
        """Which axes lie inside a node."""
        moving = [axis for axis in self.order if self.cut.size(axis) > 1]
        inside = [axis for axis in moving if axis in self.inside_axes]
        across = [axis for axis in moving if axis not in self.inside_axes]
        parts = [f"{' and '.join(inside)} inside a node"] if inside else []
        parts += [f"{' and '.join(across)} across nodes"] if across else []
        return ", ".join(parts) or "one rank"


def order_of(cut: Cut, group: Sequence[int]) -> tuple[MeshAxis, ...]:
    """The order of axes that a mesh has which is built on these ranks; the library's own if it is none."""
    first = min(group)
    found = [rank - first for rank in group]
    for order in cut.orders(1):
        if found == list(Placement(cut, order, 1).group):
            return order
    return ORDER


def rank_order(heads: int, tile: str | tuple[int, int] | Tile, order: Sequence[str]) -> list[int]:
    """The ranks 0 .. P - 1, numbered node by node, as a mesh takes them to have its axes in ``order``.

    Args:
        heads, tile: as of the mesh.
        order: "heads", "row" and "col", those of neighbours first, as `meshattn plan` prints it.

    Returns:
        what to give `init_attention_mesh` as ``group``. ValueError for an order that is none, and for fewer
        heads than one.
    """
    if type(heads) is not int or heads < 1:
        raise ValueError(f"heads is {heads!r}: give the ranks of the head axis, 1 or more")
    tile = Tile.parse(tile) if isinstance(tile, str) else tile if isinstance(tile, Tile) else Tile(*tile)
    axes = tuple(axis for name in order for axis in ORDER if axis == name)
    missing = tuple(axis for axis in ORDER if axis not in order)
    if len(axes) != len(order) or len(set(axes)) != len(axes):
        raise ValueError(f"order is {tuple(order)}, but names heads, row and col, each once at most")
    return list(Placement(Cut(heads, tile), (*axes, *missing), 1).group)
