"""What goes over the links of a cluster in one pass, in closed form."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .cost import CallShape, traffic
from .heads import exchange, inner_shape
from .placement import MeshAxis, Placement
from .schedule import Direction
from .topology import Topology


@dataclass(frozen=True)
class LinkUse:
    """Bytes of one pass, or of several."""

    rank: int
    """What a rank sends; all send the same."""
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


def link_use(direction: Direction, shape: CallShape, placement: Placement, topology: Topology) -> LinkUse:
    """``shape`` as outside: ``rows`` of a rank, all heads. Masks that leave hops out are not looked at."""
    cut = placement.cut
    inner = inner_shape(shape, cut.heads) if cut.heads > 1 else shape
    flows: list[tuple[MeshAxis, int, int]] = [
        (axis, -1, part.num_bytes) for (axis, _), part in traffic(direction, cut.tile, inner).items()
    ]
    if cut.heads > 1:
        parts = exchange(direction, shape, cut.heads).values()
        each = sum(part.num_bytes for part in parts) // (cut.heads - 1)
        flows += [("heads", place, each) for place in range(1, cut.heads)]
    ports: Counter[int] = Counter()
    cards: Counter[tuple[int, int]] = Counter()
    nodes: Counter[int] = Counter()
    for axis, offset, num_bytes in flows:
        if not num_bytes:
            continue
        for rank, peer in enumerate(placement.peers(axis, offset)):
            if placement.node(rank) == placement.node(peer):
                ports[rank] += num_bytes
            else:
                cards[placement.card(rank)] += num_bytes
                nodes[placement.node(rank)] += num_bytes
    port, card = max(ports.values(), default=0), max(cards.values(), default=0)
    return LinkUse(
        rank=sum(num_bytes for *_, num_bytes in flows),
        port=port,
        card=card,
        node=max(nodes.values(), default=0),
        leaving=sum(nodes.values()),
        port_us=port / (1e3 * topology.inside.gb_per_s),
        card_us=card / (1e3 * topology.between.gb_per_s),
    )
