"""The ranks that share a sequence, their tile and their connection.

A mesh of P = w * a * b ranks has three axes, heads, row and col. Each w consecutive ranks share a chunk of
the sequence and share out its heads; chunk i = rank // w has the tile row ``i // a`` and the tile column
``i % a``. The order of the ranks is that of the DeviceMesh, process group or list of ranks that it was built
on.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING, NoReturn

import torch

from meshattn.agreement import Agreement, RankMismatchError
from meshattn.dropout import DropoutSeeds
from meshattn.layouts import LayoutKind
from meshattn.plan.assignment import Assignment, Axis, Tile
from meshattn.plan.cost import NOMINAL, CallShape, Pace
from meshattn.plan.heads import HeadSplit, head_groups
from meshattn.plan.hops import RINGS, Paths, Visibility
from meshattn.plan.pace import pace_of
from meshattn.plan.placement import Cut, order_of
from meshattn.plan.planner import choose as choose_cut
from meshattn.plan.topology import Topology
from meshattn.recording import CudaStreams, Recorder
from meshattn.transport.base import TrafficRecord, Transport, TransportError
from meshattn.transport.connect import Connection

if TYPE_CHECKING:
    from torch import Tensor

    from meshattn.sequence import ShardedSequence

AXES: tuple[Axis, Axis] = ("row", "col")


class AttentionMesh:
    """One rank's view of the mesh. Build it with ``init_attention_mesh``."""

    def __init__(
        self,
        connection: Connection,
        agreement: Agreement,
        tile: Tile | None,
        heads: int = 1,
        head_groups: str | int = "auto",
        topology: Topology | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        self.rank = connection.rank
        self.size = connection.size
        self.tile = tile
        self.heads = heads
        self.chunks = self.size // heads
        self.chunk, self.head = divmod(self.rank, heads)
        self.head_groups = head_groups
        self.topology = topology
        self.agreement = agreement
        self.dropout_seeds = DropoutSeeds(agreement)
        self.connection = connection
        self._closed = False
        self._cuda_graphs = cuda_graphs
        self._recorders: dict[torch.device, Recorder] = {}
        self._rings: dict[tuple[Assignment, Axis], tuple[int, ...]] = {}
        self._chosen: dict[Tile, None] = {}  # what "auto" took, in order

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
            layout: "striped" (token t in chunk t mod a * b: causal work is even), "zigzag" or "contiguous".
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
        """The tile of a call, ``shape`` as a rank has it outside of the head axis: the mesh's own, or for
        "auto" the one that moves the least bytes, or with a topology takes the least time.

        ``visibility`` says which blocks masks leave; by default all.
        """
        if self.tile is not None:
            return self.tile
        cut = choose_cut(self.size, shape, heads=self.heads, topology=self.topology, visibility=visibility)
        self._chosen[cut.tile] = None
        return cut.tile

    def pace(self, tile: Tile) -> Pace:
        """What the lists of a tile take links and kernels for."""
        if self.topology is None:
            return NOMINAL
        cut = Cut(self.heads, tile)
        return pace_of(self.topology, cut, order_of(cut, self.connection.names))

    def split_heads(self, shape: CallShape, device: torch.device) -> tuple[HeadSplit, int]:
        """How the heads of a call are shared out on the head axis, and into how many groups each rank splits
        its own; ``shape`` is that of a rank's rows. Exchanges that take multiprocessors from the kernels do
        not pay beside them: they wait there for the other rank.

        Raises ValueError if they do not divide.
        """
        try:
            split = HeadSplit.of(shape.heads, shape.kv_heads, self.heads)
        except ValueError as error:
            both = gcd(shape.heads, self.size)
            fitting = ", ".join(str(w) for w in range(1, both + 1) if both % w == 0)
            raise ValueError(
                f"{error}: build the mesh with heads= one of {fitting}, which divide its {self.size} ranks, "
                "too, and another tile, or tile='auto'"
            ) from None
        if isinstance(self.head_groups, str):
            taking = self.head_transport(device).multiprocessors > 0
            return split, 1 if taking else head_groups(shape, self.heads)
        if split.kv_heads % self.head_groups:
            raise ValueError(
                f"head_groups={self.head_groups}, but a rank of the head axis has {split.kv_heads} key/value "
                "heads for this call, which it cannot split so: build the mesh with a divisor of that, or "
                "with head_groups='auto'"
            )
        return split, self.head_groups

    def coordinates(self, tile: Tile | None = None) -> tuple[int, int]:
        """(tile row, tile column) of this rank's chunk; `head` is its place on the head axis."""
        tile = tile or self.tile
        if tile is None:
            raise ValueError("the tile is 'auto': coordinates depend on the shape of the call; pass a tile")
        assignment = Assignment(tile)
        return assignment.row_index(self.chunk), assignment.col_index(self.chunk)

    @property
    def owners(self) -> tuple[int, ...]:
        """For every chunk the mesh rank at this rank's place on the head axis."""
        return tuple(range(self.head, self.size, self.heads))

    @property
    def head_ranks(self) -> tuple[int, ...]:
        """The mesh ranks of this rank's head axis, in order."""
        first = self.chunk * self.heads
        return tuple(range(first, first + self.heads))

    def transports(self, tile: Tile, device: torch.device, paths: Paths = RINGS) -> dict[str, Transport]:
        """What moves the tensors of this device along each axis of a tile."""
        assignment = Assignment(tile, paths.turned)
        return {axis: self.connection.along(self._ring(assignment, axis), device) for axis in AXES}

    def recorder(self, device: torch.device) -> Recorder | None:
        """What records passes on this device; None where none are."""
        if device.type != "cuda" or not self._cuda_graphs or torch.cuda.get_allocator_backend() != "native":
            return None
        if device not in self._recorders:
            streams = CudaStreams(device)
            self._recorders[device] = Recorder(self.connection.transport.traffic, streams)
        return self._recorders[device]

    def head_transport(self, device: torch.device) -> Transport:
        """What moves the tensors of this device along the head axis."""
        return self.connection.along(self._head_ring(), device)

    def _ring(self, assignment: Assignment, axis: Axis) -> tuple[int, ...]:
        """The rank from which each rank receives."""
        if (assignment, axis) not in self._rings:
            chunks = [assignment.neighbour(chunk, axis, 1) for chunk in range(self.chunks)]
            places = range(self.heads)
            ring = tuple(chunk * self.heads + place for chunk in chunks for place in places)
            self._rings[assignment, axis] = ring
        return self._rings[assignment, axis]

    def _head_ring(self) -> tuple[int, ...]:
        """A ring through the ranks of every head axis."""
        w = self.heads
        return tuple(rank - rank % w + (rank + 1) % w for rank in range(self.size))

    def _describe_transport(self) -> str:
        connection = self.connection
        slow = connection.transport.name
        if not connection.nodes:
            return f"transport {slow} ({connection.reason})"
        if self.tile is None:
            return f"transport symmetric on axes inside a host, else {slow} ({connection.reason})"
        rings = {"heads": self._head_ring()} if self.heads > 1 else {}
        for axis in AXES:
            if self.tile.size(axis) > 1:
                rings[axis] = self._ring(Assignment(self.tile), axis)
        kinds = [f"{axis} {'symmetric' if connection.inside(ring) else slow}" for axis, ring in rings.items()]
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
            what = "the fewest bytes" if self.topology is None else "the least predicted time"
            chosen = f" (so far {', '.join(map(str, self._chosen))})" if self._chosen else ""
            tile = f"tile auto: {what} for each shape{chosen}"
        else:
            tile = f"tile {self.tile}, query by key/value chunks of each rank"
        heads = ""
        if self.heads > 1:
            groups = "by shape" if self.head_groups == "auto" else self.head_groups
            heads = f"heads {self.heads}, shared out among consecutive ranks, groups {groups}; "
        return (
            f"AttentionMesh of {_counted(self.size, 'rank')} {list(self.connection.names)}, "
            f"this is mesh rank {self.rank}; {heads}"
            f"{tile}; {'' if self.topology is None else f'topology {self.topology.name}; '}"
            f"{self._describe_transport()}"
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
            self.agreement.leave()
            self.forget_graphs()
            self.connection = self.connection.close()

    def forget_graphs(self) -> None:
        """Drop the recorded passes, and give back their memory; those that recur are recorded anew. Not
        collective.
        """
        for recorder in self._recorders.values():
            recorder.clear()

    def require_open(self) -> None:
        """ValueError after `close`."""
        if self._closed:
            raise ValueError("this mesh has been closed: build a new one with init_attention_mesh()")


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("s" if number != 1 else "")
