"""What one pass of one rank does: the list, the way round its rings, and the hops that take place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from .assignment import Assignment, Tile
from .cost import NOMINAL, CallShape, Pace, costs, message_bytes
from .greedy import build
from .hops import Hops, Paths, Reach, Visibility
from .schedule import Direction, Schedule


@dataclass(frozen=True)
class Route:
    """The same ``schedule`` and ``paths`` on all ranks, and what they mean on one."""

    schedule: Schedule
    paths: Paths
    assignment: Assignment
    hops: Hops


@lru_cache(maxsize=256)
def route(
    direction: Direction,
    shape: CallShape,
    tile: Tile,
    visibility: Visibility,
    rank: int,
    *,
    cuts: bool = True,
    pace: Pace = NOMINAL,
) -> Route:
    """The route of a pass where masks leave these blocks: a pure function of its arguments. ``cuts`` says
    whether the kernel can compute a block in parts, ``pace`` what the list takes links and kernels for."""
    reach = reach_of(tile, visibility)
    paths = reach.paths(message_bytes(direction, shape))
    cost = costs(direction, shape, pace)
    return Route(
        schedule=build(
            direction, tile, cost if cuts else replace(cost, cut=None), pace.channels, direct=paths.direct
        ),
        paths=paths,
        assignment=Assignment(tile, paths.turned),
        hops=reach.hops(rank, paths),
    )


@lru_cache(maxsize=64)
def reach_of(tile: Tile, visibility: Visibility) -> Reach:
    """`Reach`, kept."""
    return Reach(tile, visibility)
