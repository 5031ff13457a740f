"""The ranks that share a sequence, their tile and their connection.

A mesh of P = a * b ranks gives rank i the tile row ``i // a`` and the tile column ``i % a``. The order of
the ranks is that of the DeviceMesh, process group or list of ranks that it was built on.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

import torch

from meshattn.agreement import Agreement, RankMismatchError
from meshattn.dropout import DropoutSeeds
from meshattn.layouts import LayoutKind
from meshattn.plan.assignment import Assignment, Axis, Tile
from meshattn.plan.cost import CallShape, choose_tile
from meshattn.plan.hops import RINGS, Paths, Visibility
from meshattn.transport.base import TrafficRecord, Transport, TransportError
from meshattn.transport.connect import Connection, Group, check_transport, choose, connect

if TYPE_CHECKING:
    from torch import Tensor

    from meshattn.sequence import ShardedSequence

DEFAULT_TIMEOUT = 600.0
AXES: tuple[Axis, Axis] = ("row", "col")


def init_attention_mesh(
    group: Group | None = None,
    *,
    tile: str | tuple[int, int] | Tile = "auto",
    heads: int = 1,
    transport: str = "auto",
    timeout: float | timedelta = DEFAULT_TIMEOUT,
) -> AttentionMesh:
    """Build the mesh of ranks over which one sequence is spread. Collective over ``group``, and over it
    alone.

    Args:
        group: the ranks that share a sequence: a ProcessGroup, a DeviceMesh axis (coordinates follow its
            order), a list of global ranks (in that order), a simulated group, or None for the default
            group.
        tile: (a, b) or "AxB": every rank computes a query chunks against b key/value chunks, a * b = P. (1,
            P) is Ring-Attention. "auto" takes the tile that moves the least bytes, at the first call of
            each shape.
        heads: ranks of the head axis; only 1 so far.
        transport: "auto" takes the copy engines on the axes whose neighbours share a host and "p2p" on the
            others, found out by all ranks together; call torch.cuda.set_device before. "symmetric" insists on
            copy engines, "p2p" on torch.distributed send and receive (gloo, NCCL); a simulated group has
            "threads".
        timeout: how long a rank waits for another, in seconds or as a timedelta.

    Raises:
        ValueError: on every rank alike, for a tile that does not multiply to P, an unknown transport or a
            wrong group.
        NotImplementedError: for ``heads`` other than 1.
    """
    chosen: Tile | None = None
    error: Exception | None = None
    seconds = DEFAULT_TIMEOUT
    try:
        seconds = _seconds(timeout)
    except ValueError as failure:
        error = failure
    connection = connect(group, seconds)
    agreement = Agreement(connection.store, connection.name, connection.names, seconds)
    try:
        check_transport(transport, group)
        chosen = _tile(tile, connection.size)
        if heads != 1:
            raise NotImplementedError(f"heads={heads!r}: the head axis is not implemented yet; use heads=1")
    except Exception as failure:  # whatever it is, the other ranks must not wait for this one
        error = error or failure
    stated = {
        "ranks": str(list(connection.names)),
        "tile": str(chosen or "auto"),
        "heads": str(heads),
        "transport": str(transport),
    }
    agreement.enter("init_attention_mesh", stated, error)
    return AttentionMesh(choose(connection, transport), agreement, chosen)


class AttentionMesh:
    """One rank's view of the mesh. Build it with ``init_attention_mesh``."""

    def __init__(self, connection: Connection, agreement: Agreement, tile: Tile | None) -> None:
        self.rank = connection.rank
        self.size = connection.size
        self.tile = tile
        self.agreement = agreement
        self.dropout_seeds = DropoutSeeds(agreement)
        self.connection = connection
        self._closed = False
        self._rings: dict[tuple[Assignment, Axis], tuple[int, ...]] = {}

    def sequence(
        self,
        seq_len: int,
        *,
        layout: LayoutKind = "striped",
        cu_seqlens: Sequence[int] | Tensor | None = None,
        document_lengths: Sequence[int] | Tensor | None = None,
    ) -> ShardedSequence:
        """How a sequence of ``seq_len`` tokens is spread over the mesh. No communication.

        Args:
            seq_len: global length S, any number from 1 on; it need not divide by anything.
            layout: "striped" (token t on rank t mod P: causal work is balanced), "zigzag" or "contiguous".
            cu_seqlens: packed documents, of any lengths from 0 on: integers, of which document d holds the
                positions cu_seqlens[d] .. cu_seqlens[d + 1] - 1; the same on every rank. It starts with 0 and
                may end before S: what is left belongs to no document. A tensor is copied to the CPU, once.
            document_lengths: positions used of each of these slots, where a document does not fill its own.

        Raises:
            ValueError: a length, layout or bound that is not valid, on this rank alone.
        """
        from meshattn.sequence import ShardedSequence

        return ShardedSequence(self, seq_len, layout, cu_seqlens, document_lengths)

    def tile_for(self, shape: CallShape, visibility: Visibility | None = None) -> Tile:
        """The tile of a call: the mesh's own, or for "auto" the one that moves the least bytes.

        ``visibility`` says which blocks masks leave; by default all.
        """
        return self.tile or _least_bytes(self.size, shape, visibility)

    def coordinates(self, tile: Tile | None = None) -> tuple[int, int]:
        """(tile row, tile column) of this rank."""
        tile = tile or self.tile
        if tile is None:
            raise ValueError("the tile is 'auto': coordinates depend on the shape of the call; pass a tile")
        assignment = Assignment(tile)
        return assignment.row_index(self.rank), assignment.col_index(self.rank)

    def transports(self, tile: Tile, device: torch.device, paths: Paths = RINGS) -> dict[str, Transport]:
        """What moves the tensors of this device along each axis of a tile."""
        assignment = Assignment(tile, paths.turned)
        return {axis: self.connection.along(self._ring(assignment, axis), device) for axis in AXES}

    def _ring(self, assignment: Assignment, axis: Axis) -> tuple[int, ...]:
        """The rank from which each rank receives."""
        if (assignment, axis) not in self._rings:
            ring = tuple(assignment.neighbour(rank, axis, 1) for rank in range(self.size))
            self._rings[assignment, axis] = ring
        return self._rings[assignment, axis]

    def _describe_transport(self) -> str:
        connection = self.connection
        slow = connection.transport.name
        if not connection.nodes:
            return f"transport {slow} ({connection.reason})"
        if self.tile is None:
            return f"transport symmetric on axes inside a host, else {slow} ({connection.reason})"
        kinds = [
            f"{axis} {'symmetric' if connection.inside(self._ring(Assignment(self.tile), axis)) else slow}"
            for axis in AXES
            if self.tile.size(axis) > 1
        ]
        return f"transport {', '.join(kinds)} ({connection.reason})"

    def traffic(self) -> tuple[TrafficRecord, ...]:
        """Bytes and messages that this rank has sent and received, by phase, axis and flow."""
        return self.connection.transport.traffic.records()

    def reset_traffic(self) -> None:
        """Count from zero again."""
        self.connection.transport.traffic.reset()

    def describe(self) -> str:
        """Ranks, tile and transport in words."""
        if self.tile is None:
            tile = "tile auto: the fewest bytes for each shape"
        else:
            tile = f"tile {self.tile}, query by key/value chunks of each rank"
        return (
            f"AttentionMesh of {_counted(self.size, 'rank')} {list(self.connection.names)}, "
            f"this is rank {self.rank}; "
            f"{tile}; {self._describe_transport()}"
        )

    def __repr__(self) -> str:
        return f"<{self.describe()}>"

    def __copy__(self) -> AttentionMesh:
        return self

    def __deepcopy__(self, _: object) -> AttentionMesh:
        """The same mesh: a copy of a module that holds it uses one connection with the module."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an AttentionMesh is a connection of this process and cannot be pickled, nor can its sequences: "
            "leave them out, and build them again with init_attention_mesh() and mesh.sequence()"
        )

    def explain(self, error: TransportError) -> Exception:
        """What to raise after a failed transfer: who called with other arguments, if that was the cause."""
        blamed = self.agreement.blame()
        return error if blamed is None else RankMismatchError(f"{blamed} (noticed in {error})")

    def check(self) -> None:
        """Raise if a transfer is known to have failed; costs nothing and waits for nothing.

        On a GPU the host does not wait for transfers, so a failure shows at a later call; until then results
        are wrong, with copy engines NaN. Check after synchronising with the GPU and before results leave it,
        for example before a checkpoint is written.
        """
        try:
            self.connection.check()
        except TransportError as error:
            raise self.explain(error) from error

    def close(self) -> None:
        """Give back the connection. Collective; the mesh cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            self.connection.close()

    def require_open(self) -> None:
        """ValueError after `close`."""
        if self._closed:
            raise ValueError("this mesh has been closed: build a new one with init_attention_mesh()")


def _seconds(timeout: float | timedelta) -> float:
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0.001 <= timeout <= 1e7:
        raise ValueError(f"timeout is {timeout!r}: give seconds between 0.001 and 1e7, or a timedelta")
    return float(timeout)


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("s" if number != 1 else "")


def _tile(tile: str | tuple[int, int] | Tile, ranks: int) -> Tile | None:
    if tile == "auto":
        return None
    if isinstance(tile, str):
        tile = Tile.parse(tile)
    elif not isinstance(tile, Tile):
        if not isinstance(tile, (tuple, list)) or [type(size) for size in tile] != [int, int]:
            raise ValueError(f"tile {tile!r}: give two whole numbers (a, b), or text such as '2x4'")
        tile = Tile(*tile)
    if tile.ranks != ranks:
        fitting = ", ".join(f"{a}x{ranks // a}" for a in range(1, ranks + 1) if ranks % a == 0)
        raise ValueError(
            f"tile {tile} needs {tile.ranks} ranks but the mesh has {ranks}: use one of {fitting}"
        )
    return tile


@lru_cache(maxsize=256)
def _least_bytes(ranks: int, shape: CallShape, visibility: Visibility | None) -> Tile:
    return choose_tile(ranks, shape, visibility=visibility)
