"""Plans: who computes what, in which order, and what it costs. Pure integers; no tensors, no torch."""

from .assignment import Assignment, Axis, Tile, tiles
from .check import check
from .greedy import build
from .makespan import makespan
from .schedule import Block, Channels, Costs, Direction, Merge, Payload, Schedule, Slots, Step, Transfer

__all__ = [
    "Assignment",
    "Axis",
    "Block",
    "Channels",
    "Costs",
    "Direction",
    "Merge",
    "Payload",
    "Schedule",
    "Slots",
    "Step",
    "Tile",
    "Transfer",
    "build",
    "check",
    "makespan",
    "tiles",
]
