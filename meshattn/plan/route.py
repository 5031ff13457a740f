"""What one pass of one rank does: the list, the way round its rings, and the hops that take place."""

from __future__ import annotations

from dataclasses import dataclass

from .assignment import Assignment
from .cost import CallShape, costs, message_bytes
from .greedy import build
from .hops import Hops, Paths, Reach
from .schedule import Direction, Schedule


@dataclass(frozen=True)
class Route:
    """The same ``schedule`` and ``paths`` on all ranks, and what they mean on one."""

    schedule: Schedule
    paths: Paths
    assignment: Assignment
    hops: Hops


def route(direction: Direction, shape: CallShape, reach: Reach, rank: int) -> Route:
    """The route of a pass over the tile and the masks of ``reach``: a pure function of its arguments."""
    paths = reach.paths(message_bytes(direction, shape))
    return Route(
        schedule=build(direction, reach.tile, costs(direction, shape), direct=paths.direct),
        paths=paths,
        assignment=Assignment(reach.tile, paths.turned),
        hops=reach.hops(rank, paths),
    )
