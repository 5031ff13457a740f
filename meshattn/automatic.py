"""What a mesh makes of "auto", and of the tile and the topology that it is given."""

from __future__ import annotations

import hashlib
from pathlib import Path

from meshattn.plan.assignment import Tile
from meshattn.plan.cost import CallShape
from meshattn.plan.planner import choose
from meshattn.plan.topology import Topology, load_topology

TileLike = str | tuple[int, int] | Tile
HEAD_DIM = 128
"""Of the calls that heads="auto" is made for: bytes grow with it alike for every cut."""


def read_tile(tile: TileLike) -> Tile | None:
    """None for "auto"; ValueError for what is no tile."""
    if tile == "auto":
        return None
    if isinstance(tile, str):
        return Tile.parse(tile)
    if isinstance(tile, Tile):
        return tile
    if not isinstance(tile, (tuple, list)) or [type(size) for size in tile] != [int, int]:
        raise ValueError(f"tile {tile!r}: give two whole numbers (a, b), or text such as '2x4'")
    return Tile(*tile)


def as_topology(source: Topology | str | Path) -> Topology:
    """A topology, its file or its name; ValueError for anything else."""
    if isinstance(source, Topology):
        return source
    if not isinstance(source, (str, Path)):
        raise ValueError(f"topology is {source!r}: give a Topology, the path of its file, or a preset's name")
    return load_topology(source)


def digest(topology: Topology | None) -> str:
    """What ranks compare: the name, and a hash of all of it."""
    if topology is None:
        return "none"
    return f"{topology.name} {hashlib.sha256(topology.text().encode()).hexdigest()[:12]}"


def auto_heads(
    heads: int | str,
    num_heads: tuple[int, int] | None,
    seq_len: int | None,
    tile: TileLike,
    ranks: int,
    topology: Topology | None,
) -> int | str:
    """Ranks of the head axis; what is given instead of "auto" comes back unchecked.

    Raises ValueError for "auto" without the sizes that it needs, and for sizes that nothing needs.
    """
    timed = topology is not None
    if heads != "auto":
        for name, value in (("num_heads", num_heads), ("seq_len", seq_len)):
            if value is not None:
                raise ValueError(f"{name}={value!r} is for heads='auto' alone, but heads={heads!r}")
        return heads
    if not isinstance(num_heads, (tuple, list)) or [type(size) for size in num_heads] != [int, int]:
        raise ValueError(f"heads='auto' needs num_heads=(H, H_kv) of the calls to come, not {num_heads!r}")
    if timed != (seq_len is not None):
        why = "with a topology needs" if timed else "counts bytes without a topology, and takes no"
        raise ValueError(f"heads='auto' {why} seq_len, the global length of the calls to come")
    if seq_len is not None and (type(seq_len) is not int or seq_len < 1):
        raise ValueError(f"seq_len={seq_len!r} must be a whole number from 1 on")
    query_heads, kv_heads = num_heads
    if min(num_heads) < 1 or query_heads % kv_heads:
        raise ValueError(f"num_heads={num_heads}: H_kv must be at least 1 and divide H")
    rows = -(-(seq_len or ranks) // ranks)
    shape = CallShape(1, rows, query_heads, kv_heads, HEAD_DIM, HEAD_DIM, 2, 4, 4, causal=True)
    return choose(ranks, shape, heads=None, tile=read_tile(tile), topology=topology).heads
