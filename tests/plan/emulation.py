"""What the tests of the emulator play."""

from __future__ import annotations

from meshattn.plan import Direction, Tile
from meshattn.plan.block_cost import Mask
from meshattn.plan.pace import pace_of
from meshattn.plan.passes import pass_script
from meshattn.plan.placement import Cut
from meshattn.plan.timeline import Timeline, run
from meshattn.plan.topology import Topology
from plan.topology_cases import call

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
CUTS = [Cut(1, Tile(1, 8)), Cut(1, Tile(8, 1)), Cut(1, Tile(2, 6)), Cut(1, Tile(6, 4)), Cut(2, Tile(3, 4)),
        Cut(4, Tile(1, 3)), Cut(8, Tile(1, 1))]  # fmt: skip


def emulate(
    direction: Direction,
    cut: Cut,
    topology: Topology,
    rows: int = 500,
    *,
    paced: bool = True,
    **options: bool,
) -> Timeline:
    order = cut.orders(topology.gpus_per_node)[-1]
    pace = {"pace": pace_of(topology, cut, order)} if paced else {}
    return run(pass_script(direction, call(rows), cut, topology, order=order, **pace), topology, **options)


def triangle(chunks: int) -> Mask:
    """Causal with contiguous chunks."""
    return Mask(chunks, lambda p, q: 1.0 if q < p else 0.5 if q == p else 0.0)
