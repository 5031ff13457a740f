"""How attention is cut on the ranks of a benchmark: what is timed, and what the formulas say of it."""

from __future__ import annotations

from collections.abc import Sequence

from meshattn.plan import CallShape, Tile, total_bytes
from meshattn.plan.heads import buffer_memory, exchange, inner_shape
from meshattn.plan.placement import Cut
from meshattn.plan.planner import choose, cuts
from meshattn.plan.schedule import Direction
from meshattn.plan.topology import Topology

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


def name_of(cut: Cut) -> str:
    """AxB, or WxAxB with a head axis of W ranks."""
    return str(cut.tile) if cut.heads == 1 else str(cut)


def cut_of(text: str) -> Cut:
    """The inverse of `name_of`. Raises ValueError for what is neither."""
    first, _, rest = text.partition("x")
    if "x" in rest and first.isdecimal():
        return Cut(int(first), Tile.parse(rest))
    return Cut(1, Tile.parse(text))


def chosen_cuts(
    wanted: Sequence[str], ranks: int, shape: CallShape, topology: Topology | None, *, head_axis: bool
) -> list[Cut]:
    """Ring first, then those of the names, or all.

    Args:
        wanted: names, or "auto" for the choice of the planner; none for all.
        shape: that of a rank's rows, with all heads.
        topology: what "auto" plans for, the head axis too; None takes the fewest bytes and no head axis.
        head_axis: whether all are also those with a head axis.
    """
    heads = 1 if topology is None else None
    planned = [
        choose(ranks, shape, heads=heads, topology=topology) if text == "auto" else cut_of(text)
        for text in wanted
    ]
    every = planned or cuts(ranks, shape, None if head_axis else 1)
    return list(dict.fromkeys([Cut(1, Tile(1, ranks)), *every]))


def formula_bytes(direction: Direction, cut: Cut, shape: CallShape) -> int:
    """What every rank sends in a pass; ``shape`` is that of its rows, with all heads."""
    if cut.heads == 1:
        return total_bytes(direction, cut.tile, shape)
    between = exchange(direction, shape, cut.heads)
    inside = total_bytes(direction, cut.tile, inner_shape(shape, cut.heads))
    return inside + sum(part.num_bytes for part in between.values())


def formula_memory(cut: Cut, shape: CallShape, groups: int) -> int:
    """Buffers of a rank in the pass that needs more, its heads in so many groups."""
    return max(buffer_memory(direction, cut.tile, shape, cut.heads, groups) for direction in DIRECTIONS)
