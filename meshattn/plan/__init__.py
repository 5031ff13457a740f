"""Plans: who computes what, in which order, and what it costs. Pure integers; no tensors, no torch."""

from .assignment import Assignment, Axis, Tile, tiles
from .bound import lower_bound, tight_bound
from .check import check
from .cost import (
    CallShape,
    Memory,
    Traffic,
    choose_tile,
    costs,
    memory,
    num_hops,
    payload_bytes,
    peak_memory,
    total_bytes,
    traffic,
)
from .greedy import build
from .heads import HeadSplit, exchange, exchange_memory, head_groups, inner_shape
from .hops import Hops, Paths, Reach, Visibility, hops_of
from .makespan import makespan
from .route import Route, route
from .schedule import Block, Channels, Costs, Direction, Merge, Payload, Schedule, Slots, Step, Transfer

__all__ = [
    "Assignment",
    "Axis",
    "Block",
    "CallShape",
    "Channels",
    "Costs",
    "Direction",
    "HeadSplit",
    "Hops",
    "Memory",
    "Merge",
    "Paths",
    "Payload",
    "Reach",
    "Route",
    "Schedule",
    "Slots",
    "Step",
    "Tile",
    "Traffic",
    "Transfer",
    "Visibility",
    "build",
    "check",
    "choose_tile",
    "costs",
    "exchange",
    "exchange_memory",
    "head_groups",
    "hops_of",
    "inner_shape",
    "lower_bound",
    "makespan",
    "memory",
    "num_hops",
    "payload_bytes",
    "peak_memory",
    "route",
    "tight_bound",
    "tiles",
    "total_bytes",
    "traffic",
]
