"""What a mesh takes from the topology that it is told of: how it paces its lists, and how it groups heads."""

from __future__ import annotations

from .cost import CallShape, Pace
from .heads import head_groups
from .placement import ORDER, Cut, MeshAxis, Placement
from .topology import Topology


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
