"""The head axis in closed form: what a call looks like inside, and what the exchanges around it cost.

On a head axis of w ranks an all-to-all turns the L rows of all H heads that a rank holds into the w * L rows
of H / w heads before the tile engine, and back after it (Ulysses). Letters as in ``cost``, where a shape is
that of the call outside: ``rows`` is L. With n = B*L*H/w and n_kv = B*L_kv*K, K the key/value heads of a
rank, a rank sends

    forward   inward  (w-1) (n D + n_kv (D + D_v)) w_in     q, k, v
              outward (w-1) n (D_v w_in + m)                out, lse
    backward  inward  (w-1) n (D_v w_in + m)                do, delta; the rest is kept from the forward pass
              outward (w-1) (n D w_in + n_kv (D + D_v) x)   dq, dk, dv

bytes, with w_in of the input type, and x the same, or r where key/value heads have several copies, whose
gradients are partial results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from .assignment import Tile
from .cost import CallShape, Traffic, peak_memory
from .schedule import Direction, Way

GROUP_COST = 16 * 2**20
"""What one more head group costs, in byte times of a nominal link: launches, and a kernel's ragged end."""


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """How the heads of a call are shared out among the ranks of the head axis, each an equal run of them."""

    ranks: int  # w
    heads: int  # query heads of a rank, H / w
    kv_heads: int  # key/value heads of a rank, K
    copies: int  # of each key/value head, one after the other, on all ranks together

    @classmethod
    def of(cls, heads: int, kv_heads: int, ranks: int) -> HeadSplit:
        """As few copies of key/value heads as let every rank hold equally many, for equally many query heads
        each. Raises ValueError if the query heads do not divide."""
        if heads % ranks:
            raise ValueError(
                f"q has {heads} heads, which the {ranks} ranks of the head axis cannot share equally"
            )
        group = heads // kv_heads
        copies = group // gcd(heads // ranks, group)
        return cls(ranks, heads // ranks, kv_heads * copies // ranks, copies)


def inner_shape(shape: CallShape, ranks: int, groups: int = 1) -> CallShape:
    """The call that the tile engine runs: all rows of the axis, the heads of one rank and group."""
    split = HeadSplit.of(shape.heads, shape.kv_heads, ranks)
    return replace(
        shape,
        rows=ranks * shape.rows,
        key_rows=ranks * shape.chunk_keys,
        heads=split.heads // groups,
        kv_heads=split.kv_heads // groups,
    )


def message_bytes(direction: Direction, shape: CallShape, ranks: int, groups: int = 1) -> dict[Way, int]:
    """Bytes that a rank sends to each other one, for one head group."""
    split = HeadSplit.of(shape.heads, shape.kv_heads, ranks)
    d, d_v, w, m = shape.head_dim, shape.head_dim_v, shape.itemsize, shape.acc_itemsize
    n = shape.batch * shape.rows * split.heads // groups
    n_kv = shape.batch * shape.chunk_keys * split.kv_heads // groups
    if direction == "forward":
        return {"inward": (n * d + n_kv * (d + d_v)) * w, "outward": n * (d_v * w + m)}
    kv_size = w if split.copies == 1 else shape.reduce_itemsize
    return {"inward": n * (d_v * w + m), "outward": n * d * w + n_kv * (d + d_v) * kv_size}


def exchange(direction: Direction, shape: CallShape, ranks: int, groups: int = 1) -> dict[Way, Traffic]:
    """What one rank sends along the head axis in a pass."""
    messages = groups * (ranks - 1)
    return {
        way: Traffic(messages * size, messages)
        for way, size in message_bytes(direction, shape, ranks, groups).items()
    }


def exchange_memory(direction: Direction, shape: CallShape, ranks: int, groups: int = 1) -> int:
    """Most bytes of messages on one rank at a time: what it receives both ways, and copies of what it sends,
    for batches above 1 both ways; of several groups, one comes in while another goes out."""
    size = message_bytes(direction, shape, ranks, groups)
    sent = max(size.values()) if groups == 1 else sum(size.values())
    return (ranks - 1) * (sum(size.values()) + sent)


def buffer_memory(direction: Direction, tile: Tile, shape: CallShape, ranks: int, groups: int = 1) -> int:
    """Bytes of buffers of a rank in a pass of the cut ranks x tile, beside arguments and results."""
    if ranks == 1:
        return peak_memory(direction, tile, shape)
    inner = inner_shape(shape, ranks, groups)
    # q, k and v of all groups are kept for the backward pass; as much as q comes with do.
    sizes = (inner.query_rows + inner.kv_rows) * (inner.head_dim + inner.head_dim_v)
    joined = groups * sizes * inner.itemsize
    return joined + peak_memory(direction, tile, inner) + exchange_memory(direction, shape, ranks, groups)


def head_groups(shape: CallShape, ranks: int) -> int:
    """Into how many groups the heads of a rank are split, so that the exchange of one overlaps with the
    attention of another: a divisor of its key/value heads.

    The first group's way in and the last one's way out stay exposed, an equal part of all bytes, and every
    group costs ``GROUP_COST``. Depends on the shape alone.
    """
    kv_heads = HeadSplit.of(shape.heads, shape.kv_heads, ranks).kv_heads
    num_bytes = sum(part.num_bytes for part in exchange("forward", shape, ranks).values())
    divisors = [groups for groups in range(1, kv_heads + 1) if kv_heads % groups == 0]
    return min(divisors, key=lambda groups: (num_bytes // groups + groups * GROUP_COST, groups))
