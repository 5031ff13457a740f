"""Which keys a query sees: causal, window and document masks as one interval of keys a query row.

A rule is stated on global positions. ``block_intervals`` restates it for one pair of chunks, in their local
rows.

Letters: S_q and S_k sequence lengths of queries and keys, C rows of a chunk; s a query row and t a key row of
a chunk, x and y their global positions. The rule is -right <= x + shift - y <= left with shift = S_k - S_q,
so that the last query is aligned with the last key (bottom-right); causal is right = 0. Documents have their
own lengths each.

If both chunks are one affine piece of equal stride n, with offsets o_q and o_k, and there are no documents,
the rule is a band on s - t:

    lo = ceil((-right - (o_q - o_k + shift)) / n)  <=  s - t  <=  floor((left - (o_q - o_k + shift)) / n) = hi

In all other cases it is two arrays: the interval of global positions that a row sees, cut down to the key
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from meshattn.layouts import Layout, Piece
from meshattn_kernels.intervals import UNBOUNDED, ArrayIntervals, BandIntervals, Intervals


def checked_cu_seqlens(
    cu_seqlens: Sequence[int] | Tensor, seq_len: int, name: str = "cu_seqlens"
) -> tuple[int, ...]:
    """``cu_seqlens`` as a tuple of integers: document d holds the positions cu_seqlens[d] .. cu_seqlens[d +
    1] - 1.

    It starts at 0, does not decrease (a document may be empty) and ends at or below ``seq_len``; positions
    beyond its end belong to no document and see nothing. Copies a tensor to the CPU once. Raises ValueError.
    """
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            raise ValueError(
                f"{name} is a {cu_seqlens.dtype} tensor of shape {list(cu_seqlens.shape)}; "
                "it must be a 1-D tensor of integers"
            )
        cu_seqlens = cu_seqlens.tolist()
    bounds = tuple(int(bound) for bound in cu_seqlens)
    if len(bounds) < 2 or bounds[0] != 0:
        raise ValueError(
            f"{name} is {_shortened(bounds)}; it must start with 0 and have one more entry than documents"
        )
    for d in range(len(bounds) - 1):
        if bounds[d] > bounds[d + 1]:
            raise ValueError(
                f"{name} decreases from {bounds[d]} to {bounds[d + 1]} at entry {d + 1}; "
                "it must hold the cumulated lengths of the documents"
            )
    if bounds[-1] > seq_len:
        raise ValueError(f"{name} ends at {bounds[-1]}, beyond the sequence length {seq_len}")
    return bounds


@dataclass(frozen=True)
class Documents:
    """Packed documents: cumulated lengths of the queries and of the keys, as from ``checked_cu_seqlens``.

    Queries of document d see keys of document d only. Raises ValueError for lengths that are not cumulated
    from 0 and for two sides with unequal numbers of documents.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.q) != len(self.k):
            raise ValueError(
                f"cu_seqlens_q has {len(self.q) - 1} documents and cu_seqlens_k {len(self.k) - 1}; "
                "they must have equally many (a document may be empty)"
            )
        for name, bounds in (("cu_seqlens_q", self.q), ("cu_seqlens_k", self.k)):
            checked_cu_seqlens(bounds, bounds[-1] if bounds else 0, name)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.q, self.k))

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query ends, key starts, key ends and shifts of the documents; then one empty document for the
        tail."""
        q, k = (torch.tensor(bounds, dtype=torch.int64, device="cpu") for bounds in (self.q, self.k))
        ends = torch.cat([k[1:], k[-1:]])
        return q[1:], k, ends, ends - torch.cat([q[1:], q[-1:]])


@dataclass(frozen=True)
class MaskRule:
    """A query at x sees a key at y if -right <= x + shift - y <= left; None is unbounded."""

    left: int | None = None
    right: int | None = None
    documents: Documents | None = None

    @staticmethod
    def build(
        *, causal: bool = False, window_size: tuple[int, int] = (-1, -1), documents: Documents | None = None
    ) -> MaskRule:
        """The rule of the arguments ``causal`` and ``window_size`` (left, right; -1 is unbounded).

        Raises ValueError for a window that is not two integers from -1 on.
        """
        left, right = checked_window(window_size)
        return MaskRule(left, 0 if causal else right, documents)


def checked_window(window_size: tuple[int, int]) -> tuple[int | None, int | None]:
    """``window_size`` with None for -1. Raises ValueError for anything but two integers from -1 on."""
    if len(window_size) != 2 or not all(isinstance(size, int) and size >= -1 for size in window_size):
        raise ValueError(
            f"window_size is {window_size}; it must be (left, right), the number of keys seen before "
            "and after the query's own, -1 for no bound"
        )
    left, right = (None if size == -1 else size for size in window_size)
    return left, right


def block_intervals(rule: MaskRule, q_layout: Layout, i: int, kv_layout: Layout, j: int) -> Intervals:
    """The keys of chunk j of ``kv_layout`` that each row of chunk i of ``q_layout`` sees; arrays are on the
    CPU.

    Raises ValueError if the documents reach beyond a sequence.
    """
    n_q, n_k = q_layout.rows_in(i), kv_layout.rows_in(j)
    q_pieces, k_pieces = q_layout.pieces(i), kv_layout.pieces(j)
    if (
        rule.documents is None
        and len(q_pieces) == len(k_pieces) == 1
        and q_pieces[0].stride == k_pieces[0].stride
    ):
        offset = q_pieces[0].offset - k_pieces[0].offset + kv_layout.seq_len - q_layout.seq_len
        stride = q_pieces[0].stride
        lo = -UNBOUNDED if rule.right is None else _clamped(-((rule.right + offset) // stride))
        hi = UNBOUNDED if rule.left is None else _clamped((rule.left - offset) // stride)
        return BandIntervals(lo, hi, n_q, n_k)
    bounds = torch.full((2, q_layout.rows), n_k, dtype=torch.int32, device="cpu")
    bounds[:, :n_q] = _count_below(kv_layout, j, _key_ranges(rule, q_layout, i, kv_layout.seq_len))
    return ArrayIntervals(bounds[0], bounds[1], n_q, n_k)


@lru_cache(maxsize=1024)
def chunk_positions(layout: Layout, chunk: int) -> Tensor:
    """Global positions of the real rows of a chunk, int64 on the CPU, rising. Cached: do not write to it."""
    runs = [(run.start, run.stop, run.step) for run in (piece.positions() for piece in layout.pieces(chunk))]
    position = torch.cat([torch.arange(*run, dtype=torch.int64, device="cpu") for run in runs])
    return position[: layout.rows_in(chunk)]


@lru_cache(maxsize=16)
def _key_ranges(rule: MaskRule, q_layout: Layout, i: int, kv_len: int) -> Tensor:
    """First and end [2, n_q] of the global key positions that each row of chunk i sees, both non-decreasing.

    Cached, because a rank meets its few query chunks once a key chunk; never written to.
    """
    position = chunk_positions(q_layout, i)
    if rule.documents is None:
        low, high = torch.tensor([0, kv_len], dtype=torch.int64, device="cpu")
        aligned = position + (kv_len - q_layout.seq_len)
    else:
        for name, bounds, seq_len in (
            ("q", rule.documents.q, q_layout.seq_len),
            ("k", rule.documents.k, kv_len),
        ):
            if bounds[-1] > seq_len:
                raise ValueError(
                    f"cu_seqlens_{name} ends at {bounds[-1]}, beyond the sequence length {seq_len}"
                )
        q_ends, starts, ends, shifts = rule.documents._tables
        document = torch.searchsorted(q_ends, position, right=True)
        low, high = starts[document], ends[document]
        aligned = position + shifts[document]
    first = low.expand_as(position) if rule.left is None else torch.clamp(aligned - rule.left, low, high)
    end = high.expand_as(position) if rule.right is None else torch.clamp(aligned + rule.right + 1, low, high)
    return torch.stack([first, end])


def _count_below(layout: Layout, chunk: int, position: Tensor) -> Tensor:
    """``layout.count_below`` of a tensor of positions: the local row where each of them would go."""

    def count(piece: Piece) -> Tensor:
        below = position - piece.offset
        if piece.stride != 1:
            below = (below + piece.stride - 1).div_(piece.stride, rounding_mode="floor")
        return below.clamp_(0, piece.length)

    first, *others = map(count, layout.pieces(chunk))
    return sum(others, first)


def _clamped(edge: int) -> int:
    return max(-UNBOUNDED, min(edge, UNBOUNDED))


def _shortened(bounds: tuple[int, ...]) -> str:
    return str(list(bounds)) if len(bounds) <= 8 else f"{[*bounds[:3]]} ... of {len(bounds)} entries"
