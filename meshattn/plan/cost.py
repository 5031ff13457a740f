"""What a call costs a rank, in closed form: bytes, messages, memory, nominal times; the choice of the tile.

Letters: B batch, C and C_kv rows of a query and of a key/value chunk, H and H_kv heads, D head size of q and
k, D_v of v and out, w bytes of the input type, r of the type partials move in, m of accumulators and lse; N =
B*C*H query rows, N_kv = B*C_kv*H_kv. Per rank

    forward   (a-1) N (D w + D_v r + m)        + (b-1) N_kv (D + D_v) w
    backward  (a-1) N ((D + D_v) w + D r + 2m) + (b-1) N_kv (D + D_v) (w + r)

bytes are sent, as many are received, where every chunk is needed everywhere; hops that masks make needless
are left out. The tests hold these against the sum over the transfers of the lists.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from .assignment import Axis, Tile, tiles
from .hops import Hops, Reach, Visibility
from .schedule import AXIS, INWARD, Channels, Costs, Direction, Payload, Slots, Way, payloads

# Attention work that takes as long as one byte on a link: about 600 TFLOP/s of a large GPU beside a 300 GB/s
# link.
# Nominal on purpose: lists must not depend on measurements, because the block order decides the bits of the
# result.
FLOPS_PER_BYTE = 2000
# What a block computed in two parts costs: one more launch, and workers that have nothing to do at its end.
CUT_BYTES = 8 * 2**20
# How many times as long as it should a transfer is taken to hold multiprocessors that a long block wants.
LONGER = 2


@dataclass(frozen=True, slots=True)
class Pace:
    """What a list takes links and kernels for. Integers, so that equal paces give equal lists everywhere."""

    flops_per_byte: int = FLOPS_PER_BYTE
    row: int = 1  # how many times as long a byte takes along the row axis
    col: int = 1
    channels: Channels = "shared"

    def __post_init__(self) -> None:
        for name in ("flops_per_byte", "row", "col"):
            if getattr(self, name) < 1:
                raise ValueError(f"pace: {name} is {getattr(self, name)}, but must be at least 1")


NOMINAL = Pace()


ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
"""Bytes of a number, by the names of types that commands and files take."""
HEAD_DIM_STEP = 8
"""Head sizes are multiples of it."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """Sizes of one attention call inside the engine; ``rows`` is C, of one chunk, padding included.

    ``key_rows`` is C_kv, the rows of a key/value chunk where keys are another sequence; by default C.
    """

    batch: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    itemsize: int
    reduce_itemsize: int
    acc_itemsize: int
    causal: bool
    key_rows: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if field.name != "causal" and size is not None and size < 1:
                raise ValueError(f"shape: {field.name} is {size}, but must be at least 1")

    @property
    def query_rows(self) -> int:
        """N = B*C*H."""
        return self.batch * self.rows * self.heads

    @property
    def kv_rows(self) -> int:
        """N_kv = B*C_kv*H_kv."""
        return self.batch * self.chunk_keys * self.kv_heads

    @property
    def chunk_keys(self) -> int:
        """C_kv."""
        return self.rows if self.key_rows is None else self.key_rows


def payload_bytes(payload: Payload, shape: CallShape) -> int:
    """Bytes of one message: q; k and v; out and lse; q, do, lse and delta; dq; dk and dv."""
    w, r, m = shape.itemsize, shape.reduce_itemsize, shape.acc_itemsize
    d, d_v = shape.head_dim, shape.head_dim_v
    sizes: dict[Payload, int] = {
        "q": shape.query_rows * d * w,
        "kv": shape.kv_rows * (d + d_v) * w,
        "out": shape.query_rows * (d_v * r + m),
        "bundle": shape.query_rows * ((d + d_v) * w + 2 * m),
        "dq": shape.query_rows * d * r,
        "dkv": shape.kv_rows * (d + d_v) * r,
    }
    return sizes[payload]


def accumulator_bytes(payload: Payload, shape: CallShape) -> int:
    """Bytes of the accumulator behind an outward payload: the same numbers in the accumulator type."""
    m, d, d_v = shape.acc_itemsize, shape.head_dim, shape.head_dim_v
    sizes: dict[Payload, int] = {
        "out": shape.query_rows * (d_v + 1) * m,
        "dq": shape.query_rows * d * m,
        "dkv": shape.kv_rows * (d + d_v) * m,
    }
    return sizes[payload]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank sends, and receives."""

    num_bytes: int
    num_messages: int


def traffic(
    direction: Direction, tile: Tile, shape: CallShape, hops: Hops | None = None
) -> dict[tuple[Axis, Way], Traffic]:
    """What is sent in a pass per axis and way; an axis that moves nothing that way has an entry of zeros.

    ``hops`` are those of one rank, where masks leave some out.
    """
    result: dict[tuple[Axis, Way], Traffic] = {
        (axis, way): Traffic(0, 0) for axis in ("row", "col") for way in ("inward", "outward")
    }
    for payload in payloads(direction):
        axis = AXIS[payload]
        way: Way = "inward" if payload in INWARD else "outward"
        if hops is None:
            messages = tile.size(axis) - 1
        else:
            messages = sum(1 for hop in hops.sent if hop[:2] == (axis, way))
        result[axis, way] = Traffic(messages * payload_bytes(payload, shape), messages)
    return result


def total_bytes(direction: Direction, tile: Tile, shape: CallShape, hops: Hops | None = None) -> int:
    """Bytes that one rank sends in a pass, all axes and ways; ``hops`` as in ``traffic``."""
    return sum(part.num_bytes for part in traffic(direction, tile, shape, hops).values())


def num_hops(direction: Direction, tile: Tile) -> int:
    """Ring hops of a pass, each one message: forward 2(a-1) + (b-1), backward 2(a-1) + 2(b-1)."""
    return sum(tile.size(AXIS[payload]) - 1 for payload in payloads(direction))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of buffers on one rank during a pass, beside the arguments and results of the call."""

    chunks: int  # received ones
    accumulators: int
    receive: int  # partials that have arrived and wait for their merge
    staging: int  # one partial per outward axis, cast for sending, where reduce and accumulator type differ

    @property
    def total(self) -> int:
        return self.chunks + self.accumulators + self.receive + self.staging


def memory(direction: Direction, tile: Tile, shape: CallShape) -> Memory:
    """Buffers of a pass from the slot counts of its list, which are themselves a closed form of the tile."""
    slots = Slots.of(direction, tile)
    chunk_slots = {"row": slots.row, "col": slots.col}
    acc_slots = {"row": slots.row_acc, "col": slots.col_acc}
    recv_slots = {"row": slots.row_recv, "col": slots.col_recv}
    chunks = accumulators = receive = staging = 0
    for payload in payloads(direction):
        axis, size = AXIS[payload], payload_bytes(payload, shape)
        if payload in INWARD:
            chunks += (chunk_slots[axis] - 1) * size
            continue
        accumulators += acc_slots[axis] * accumulator_bytes(payload, shape)
        receive += recv_slots[axis] * size
        if recv_slots[axis] and shape.reduce_itemsize != shape.acc_itemsize:
            staging += size
    return Memory(chunks=chunks, accumulators=accumulators, receive=receive, staging=staging)


def peak_memory(direction: Direction, tile: Tile, shape: CallShape) -> int:
    """Total of ``memory`` in bytes."""
    return memory(direction, tile, shape).total


def block_flops(direction: Direction, shape: CallShape) -> int:
    """Matrix work of a block: forward q k^T, p v; backward s, dp, dv, dq, dk. A causal one is half full."""
    flops = shape.query_rows * shape.chunk_keys * flops_per_pair(direction, shape)
    return flops // 2 if shape.causal else flops


def flops_per_pair(direction: Direction, shape: CallShape) -> int:
    """Matrix work of one query, key and head."""
    d, d_v = shape.head_dim, shape.head_dim_v
    return 2 * (d + d_v if direction == "forward" else 3 * d + 2 * d_v)


def costs(direction: Direction, shape: CallShape, pace: Pace = NOMINAL) -> Costs:
    """Integer costs in byte times of a nominal machine, so that equal shapes give equal lists everywhere."""
    backward = direction == "backward"
    return Costs(
        block=max(1, block_flops(direction, shape) // pace.flops_per_byte),
        row_in=pace.row * payload_bytes("bundle" if backward else "q", shape),
        col_in=pace.col * payload_bytes("kv", shape),
        row_out=pace.row * payload_bytes("dq" if backward else "out", shape),
        col_out=pace.col * payload_bytes("dkv", shape) if backward else 0,
        cut=CUT_BYTES if shape.kv_heads > 1 else None,
    )


Room = Literal["all along", "at first", "none"]
"""What a block leaves to a transfer beside it that takes an eighth of the GPU: that eighth all along; that
eighth until the transfer should have ended; nothing, so that workers that find no place begin when the
transfer has ended."""


def room_for(direction: Direction, shape: CallShape, tile: Tile, pace: Pace = NOMINAL) -> Room:
    """What blocks leave to transfers.

    All along costs a block an eighth of its time: too much for long ones. Workers of a backward wait for each
    other, so that they gain nothing if those that begin late have less to do (measured: they lose).
    """
    cost = costs(direction, shape, pace)
    moving = [cost.row_in, cost.row_out] if tile.a > 1 else []
    moving += [cost.col_in, cost.col_out] if tile.b > 1 else []
    if cost.block < 8 * max(moving, default=0):
        return "all along"
    return "at first" if direction == "forward" else "none"


def delay_units(moving: int, block: int) -> int:
    """For so many 64ths of a long block a transfer holds its multiprocessors.

    Taken for longer than it should be: workers that begin later than expected hold up the whole block, and
    those that could have begun sooner leave an eighth of the GPU idle.
    """
    return min(64, -(-64 * LONGER * max(0, moving) // block))


def message_bytes(direction: Direction, shape: CallShape) -> dict[tuple[Axis, Way], int]:
    """Bytes of one message of a pass, by axis and way."""
    return {
        (AXIS[payload], "inward" if payload in INWARD else "outward"): payload_bytes(payload, shape)
        for payload in payloads(direction)
    }


def reached_bytes(direction: Direction, shape: CallShape, reach: Reach) -> tuple[int, int]:
    """Bytes and messages of a pass that all ranks together send where masks leave hops out."""
    sizes = message_bytes(direction, shape)
    paths = reach.paths(sizes)
    hops = {part: reach.num_hops(*part, paths) for part in sizes}
    return sum(hops[part] * size for part, size in sizes.items()), sum(hops.values())


def choose_tile(
    ranks: int,
    shape: CallShape,
    *,
    memory_limit: int | None = None,
    visibility: Visibility | None = None,
) -> Tile:
    """The tile with the least bytes of both passes together; ties: fewer hops, less memory, smaller a.

    ``memory_limit`` is in bytes for the buffers of either pass; ValueError if no tile keeps within it.
    ``visibility`` says which blocks masks leave; by default all. Depends on its arguments only, never on a
    measurement.
    """
    passes: tuple[Direction, Direction] = ("forward", "backward")
    every_block = visibility is None or visibility == Visibility.full(ranks)

    def need(tile: Tile) -> int:
        return max(peak_memory(direction, tile, shape) for direction in passes)

    def price(tile: Tile) -> tuple[int, int, int, int]:
        if visibility is None or every_block:
            num_bytes = sum(total_bytes(direction, tile, shape) for direction in passes)
            hops = sum(num_hops(direction, tile) for direction in passes)
        else:
            reach = Reach(tile, visibility)
            moved = [reached_bytes(direction, shape, reach) for direction in passes]
            num_bytes, hops = (sum(part) for part in zip(*moved, strict=True))
        return num_bytes, hops, need(tile), tile.a

    every = tiles(ranks)
    fitting = [tile for tile in every if memory_limit is None or need(tile) <= memory_limit]
    if not fitting:
        smallest = min(every, key=need)
        raise ValueError(
            f"memory_limit is {memory_limit} bytes, but the buffers of a rank take at least {need(smallest)} "
            f"bytes (tile {smallest} of {ranks} ranks): raise the limit or use more ranks"
        )
    return min(fitting, key=price)
