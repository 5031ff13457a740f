"""What a step list is: transfers, blocks and merges in local numbers, the same list for all ranks.

Local numbers: Q#0 and KV#0 are a rank's own chunk, #k comes from the k-th neighbour to the right on the ring
of its axis. The row ring carries queries (forward ``q``; backward ``bundle`` = q, do, lse, delta) inward and
row partials (``out``; ``dq``) outward; the column ring carries ``kv`` inward and, backward, ``dkv`` outward.
All go to the left neighbour.

Inward transfer k sends chunk #(k-1) and receives #k. Outward transfer k sends the partial of line #k,
complete on this rank and merged with what the right neighbour sent before, and receives the neighbour's line
#k, which is this rank's #((k+1) mod n): it is merged there before that line is sent on, or, at the last hop,
into the own line #0. A line takes its first merge only after all its blocks.

That is a ring. Along a direct axis, for chunks that few ranks need, nothing is handed on: inward transfer k
sends the own chunk to the k-th neighbour to the left and receives #k from its owner; outward transfer k sends
the own part of line #k home to its owner and receives one of line #0, into which it is merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .assignment import Axis, Tile

Direction = Literal["forward", "backward"]
Payload = Literal["q", "kv", "out", "bundle", "dq", "dkv"]
Way = Literal["inward", "outward"]
Channels = Literal["shared", "per_axis"]

AXIS: dict[Payload, Axis] = {
    "q": "row",
    "kv": "col",
    "out": "row",
    "bundle": "row",
    "dq": "row",
    "dkv": "col",
}
INWARD: frozenset[Payload] = frozenset(("q", "kv", "bundle"))
# Receive slots of a chain whose chunks are dropped once used: one in use, one being passed on, one arriving.
RING_SLOTS = 3


def payloads(direction: Direction) -> tuple[Payload, ...]:
    """The payloads of a pass: inward row, inward column, outward row and, backward, outward column."""
    if direction == "forward":
        return ("q", "kv", "out")
    if direction == "backward":
        return ("bundle", "kv", "dq", "dkv")
    raise ValueError(f"direction is {direction!r}: it must be 'forward' or 'backward'")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message sent and one received, along the ring of the payload's axis."""

    number: int  # position among all transfers of the list
    payload: Payload
    index: int  # k = 1 .. n-1, ascending within a payload; n ranks on the ring
    sent: int  # local number of the chunk or partial that is handed on
    received: int  # local number, as this rank counts, of what arrives
    offset: int  # sent to the rank at this offset along the axis, received from -offset
    send_slot: int  # inward: slot of the chunk pool; outward: accumulator slot
    recv_slot: int  # inward: slot of the chunk pool; outward: slot of the receive pool
    last_use: int  # the step after which the received buffer is free again

    @property
    def axis(self) -> Axis:
        return AXIS[self.payload]

    @property
    def inward(self) -> bool:
        return self.payload in INWARD

    @property
    def way(self) -> Way:
        return "inward" if self.payload in INWARD else "outward"


@dataclass(frozen=True, slots=True)
class Block:
    """Attention of Q#row against KV#col. ``col_acc`` is -1 forward, where columns collect nothing.

    The own block (0, 0), which is there from the start and needed last, may be cut into ``parts``, of some
    heads each, of which this is number ``part``: one for the transfers of the start to hide behind, one for
    those of the end.
    """

    row: int
    col: int
    row_slot: int
    col_slot: int
    row_acc: int
    col_acc: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge the received partial in ``recv_slot`` into line #index, held in accumulator ``acc``."""

    payload: Payload
    index: int
    transfer: int
    recv_slot: int
    acc: int


@dataclass(frozen=True, slots=True)
class Step:
    """Executed in this order: wait for transfers (both halves), merge, start transfers, run blocks.

    At most one inward and one outward transfer per axis. All that a step uses was waited for in it or before.
    """

    waits: tuple[int, ...]
    merges: tuple[Merge, ...]
    transfers: tuple[Transfer, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Slots:
    """Buffers of one rank: chunk pools, accumulators and receive pools of partials, per axis.

    The own chunk is slot 0 of ``row`` and ``col``, the own line is slot 0 of ``row_acc`` and ``col_acc``.
    """

    row: int
    col: int
    row_acc: int
    col_acc: int
    row_recv: int
    col_recv: int

    @classmethod
    def of(cls, direction: Direction, tile: Tile) -> Slots:
        """Closed form: a tile keeps all its chunks, a chain (one side is 1) three besides its own."""
        row = _chunk_slots(tile.a, tile.b)
        col = _chunk_slots(tile.b, tile.a)
        backward = direction == "backward"
        return cls(
            row=row,
            col=col,
            row_acc=row,
            col_acc=col if backward else 0,
            row_recv=min(tile.a - 1, RING_SLOTS),
            col_recv=min(tile.b - 1, RING_SLOTS) if backward else 0,
        )


def _chunk_slots(size: int, other: int) -> int:
    return 1 + (size - 1 if other > 1 else min(size - 1, RING_SLOTS))


def chunk_slot(k: int, slots: int) -> int:
    """Slot of chunk or line #k in a pool of ``slots``: 0 for the own one, the others in turn."""
    return 0 if k == 0 else 1 + (k - 1) % (slots - 1)


@dataclass(frozen=True, slots=True)
class Costs:
    """Integer time units: one block, one transfer of each kind, one merge.

    ``cut`` is what it costs to compute a block in two parts; None keeps all blocks whole.
    """

    block: int
    row_in: int
    col_in: int
    row_out: int
    col_out: int = 0
    merge: int = 0
    cut: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            cost = getattr(self, name)
            if cost is not None and cost < 0:
                raise ValueError(f"costs: {name} is {cost}, but a cost cannot be negative")

    def of_block(self, parts: int) -> int:
        """Time of a block, or of one of its parts."""
        return self.block if parts == 1 else -(-(self.block + (self.cut or 0)) // parts)

    def of(self, payload: Payload) -> int:
        """Time of one transfer of ``payload``."""
        inward = payload in INWARD
        if AXIS[payload] == "row":
            return self.row_in if inward else self.row_out
        return self.col_in if inward else self.col_out


@dataclass(frozen=True, slots=True)
class Schedule:
    """The step list of one pass. All ranks of the tile run the same list."""

    direction: Direction
    tile: Tile
    slots: Slots
    steps: tuple[Step, ...]
    direct: frozenset[Axis] = frozenset()

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(t for step in self.steps for t in step.transfers)

    @property
    def num_transfers(self) -> int:
        return sum(len(step.transfers) for step in self.steps)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for step in self.steps for block in step.blocks)
