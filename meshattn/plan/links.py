"""What goes over the links of a cluster in one pass, in closed form."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .cost import CallShape, traffic
from .heads import exchange, inner_shape
from .placement import ORDER, MeshAxis, Placement
from .schedule import Direction
from .script import Exchange, Script
from .topology import Topology


@dataclass(frozen=True)
class LinkUse:
    """Bytes of one pass, or of several."""

    rank: int
    """What a rank sends, where masks leave hops out the one that sends most."""
    port: int
    """What goes out of the busiest GPU inside its node."""
    card: int
    """What leaves a node through the busiest network card."""
    node: int
    """What leaves the busiest node."""
    leaving: int
    """What leaves all nodes together."""
    port_us: float
    card_us: float

    def __add__(self, other: LinkUse) -> LinkUse:
        return LinkUse(
            self.rank + other.rank,
            self.port + other.port,
            self.card + other.card,
            self.node + other.node,
            self.leaving + other.leaving,
            self.port_us + other.port_us,
            self.card_us + other.card_us,
        )


Counts = tuple[int, int, int]
"""Exchanges along heads, row and col."""


@lru_cache(maxsize=4096)
def _counts(placement: Placement) -> tuple[list[Counts], list[Counts], list[Counts], Counts]:
    """To how many peers goes what leaves a GPU inside its node, a network card, a node, and all nodes; of
    GPUs, cards and nodes one of each kind."""
    ports, cards, nodes = Counter[tuple[int, int]](), Counter[Any](), Counter[Any]()
    for number, axis in enumerate(ORDER):
        if placement.cut.size(axis) > 1:
            for offset in range(1, placement.cut.heads) if axis == "heads" else (-1,):
                for rank, peer in enumerate(placement.peers(axis, offset, placement.period)):
                    if placement.node(rank) == placement.node(peer):
                        ports[rank, number] += 1
                    else:
                        cards[placement.card(rank), number] += 1
                        nodes[placement.node(rank), number] += 1

    def kinds(counts: Counter[Any]) -> list[Counts]:
        names = dict.fromkeys(name for name, _ in counts)
        return list({(counts[name, 0], counts[name, 1], counts[name, 2]): None for name in names})

    everything: Counts = tuple(  # type: ignore[assignment]
        placement.ranks // placement.period * sum(count for (_, n), count in nodes.items() if n == number)
        for number in range(3)
    )
    return kinds(ports), kinds(cards), kinds(nodes), everything


def used_links(script: Script, topology: Topology) -> LinkUse:
    """What the exchanges of a script send, counted one by one: where masks leave hops out."""
    placement = script.placement
    ports, cards, nodes, ranks = Counter[int](), Counter[Any](), Counter[int](), Counter[int]()
    alike = Counter[tuple[MeshAxis, int, tuple[bool, ...] | None]]()
    for entry in script.entries:
        if isinstance(entry, Exchange):
            alike[entry.axis, entry.offset, entry.sends] += entry.num_bytes
    for (axis, offset, sends), num_bytes in alike.items():
        for rank, peer in enumerate(placement.peers(axis, offset)):
            if sends is None or sends[rank]:
                ranks[rank] += num_bytes
                if placement.node(rank) == placement.node(peer):
                    ports[rank] += num_bytes
                else:
                    cards[placement.card(rank)] += num_bytes
                    nodes[placement.node(rank)] += num_bytes
    rank, port, card, node = (max(each.values(), default=0) for each in (ranks, ports, cards, nodes))
    return LinkUse(
        rank=rank,
        port=port,
        card=card,
        node=node,
        leaving=sum(nodes.values()),
        port_us=port / (1e3 * topology.inside.gb_per_s),
        card_us=card / (1e3 * topology.across.gb_per_s) if card else 0.0,
    )


def link_use(direction: Direction, shape: CallShape, placement: Placement, topology: Topology) -> LinkUse:
    """``shape`` as outside: ``rows`` of a rank, all heads. Masks that leave hops out are not looked at."""
    cut = placement.cut
    inner = inner_shape(shape, cut.heads) if cut.heads > 1 else shape
    moved: Counter[str] = Counter()  # bytes to one peer
    for (axis, _), part in traffic(direction, cut.tile, inner).items():
        moved[axis] += part.num_bytes
    if cut.heads > 1:
        parts = exchange(direction, shape, cut.heads).values()
        moved["heads"] = sum(part.num_bytes for part in parts) // (cut.heads - 1)
    sizes = [moved[axis] for axis in ORDER]

    def num_bytes(counts: Counts) -> int:
        return sum(count * size for count, size in zip(counts, sizes, strict=True))

    ports, cards, nodes, everything = _counts(placement)
    port, card = max(map(num_bytes, ports), default=0), max(map(num_bytes, cards), default=0)
    return LinkUse(
        rank=num_bytes((cut.heads - 1, 1, 1)),
        port=port,
        card=card,
        node=max(map(num_bytes, nodes), default=0),
        leaving=num_bytes(everything),
        port_us=port / (1e3 * topology.inside.gb_per_s),
        card_us=card / (1e3 * topology.across.gb_per_s) if card else 0.0,
    )
