"""What a mesh makes of its arguments: of "auto", of the tile, the head axis, the topology and the timeout."""

from __future__ import annotations

import hashlib
from datetime import timedelta
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


def check_switch(name: str, value: object) -> None:
    """ValueError for what is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: it must be True or False")


def digest(topology: Topology | None) -> str:
    """What ranks compare: the name, and a hash of all that plans follow from."""
    if topology is None:
        return "none"
    return f"{topology.name} {hashlib.sha256(repr(topology).encode()).hexdigest()[:12]}"


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


def seconds_of(timeout: float | timedelta) -> float:
    """ValueError for what is no time to wait."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0.001 <= timeout <= 1e7:
        raise ValueError(f"timeout is {timeout!r}: give seconds between 0.001 and 1e7, or a timedelta")
    return float(timeout)


def checked_heads(heads: int | str, head_groups: str | int, ranks: int) -> int:
    """Ranks of the head axis; ValueError where they or the groups of heads cannot be."""
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or ranks % heads:
        fitting = ", ".join(str(w) for w in range(1, ranks + 1) if ranks % w == 0)
        whole = "" if type(heads) is int else "be a whole number or 'auto', and "
        raise ValueError(
            f"heads={heads!r} must {whole}divide the {ranks} ranks of the mesh: use one of {fitting}"
        )
    if head_groups == "auto":
        return heads
    if type(head_groups) is not int or head_groups < 1:
        raise ValueError(f"head_groups={head_groups!r}: give a whole number from 1 on, or 'auto'")
    if heads == 1 and head_groups != 1:
        raise ValueError(
            f"head_groups={head_groups} without a head axis: there is no exchange of heads that it could "
            "hide; leave it out, or pass heads="
        )
    return heads


def checked_tile(tile: TileLike, ranks: int, heads: int) -> Tile | None:
    """None for "auto"; ValueError for a tile that these ranks do not fill."""
    chosen = read_tile(tile)
    if chosen is None:
        return None
    if chosen.ranks != (chunks := ranks // heads):
        fitting = ", ".join(f"{a}x{chunks // a}" for a in range(1, chunks + 1) if chunks % a == 0)
        with_heads = f" with heads={heads}" if heads > 1 else ""
        raise ValueError(
            f"tile {chosen} needs {chosen.ranks * heads} ranks{with_heads} but the mesh has {ranks}: use one "
            f"of {fitting}"
        )
    return chosen
