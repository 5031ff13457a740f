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
chunk. They are made on the CPU, so that whether a block is empty never asks a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from meshattn.documents import Documents
from meshattn.layouts import Layout, Piece
from meshattn.plan.hops import Visibility
from meshattn_kernels.intervals import UNBOUNDED, ArrayIntervals, BandIntervals, Intervals

_FARTHEST = 2**62  # distances from here on are no bound: int64 holds their sums with positions no more


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
    """``window_size`` with None for -1, and for what reaches beyond any sequence. Raises ValueError for
    anything but two integers from -1 on."""
    if (
        not isinstance(window_size, (tuple, list))
        or len(window_size) != 2
        or not all(type(size) is int and size >= -1 for size in window_size)
    ):
        raise ValueError(
            f"window_size is {window_size}; it must be (left, right), the number of keys seen before "
            "and after the query's own, -1 for no bound"
        )
    left, right = (size if 0 <= size < _FARTHEST else None for size in window_size)
    return left, right


def block_intervals(rule: MaskRule, q_layout: Layout, i: int, kv_layout: Layout, j: int) -> Intervals:
    """The keys of chunk j of ``kv_layout`` that each row of chunk i of ``q_layout`` sees; arrays are on the
    CPU.

    Raises ValueError if the documents reach beyond a sequence.
    """
    n_q, n_k = q_layout.rows_in(i), kv_layout.rows_in(j)
    if rule.documents is not None:  # what lies behind the last one is like padding
        n_q = min(n_q, q_layout.count_below(i, rule.documents.q[-1]))
        n_k = min(n_k, kv_layout.count_below(j, rule.documents.k[-1]))
    if gives_bands(rule, q_layout, kv_layout):
        (q_piece,), (k_piece,) = q_layout.pieces(i), kv_layout.pieces(j)
        offset = q_piece.offset - k_piece.offset + kv_layout.seq_len - q_layout.seq_len
        stride = q_piece.stride
        lo = -UNBOUNDED if rule.right is None else _clamped(-((rule.right + offset) // stride))
        hi = UNBOUNDED if rule.left is None else _clamped((rule.left - offset) // stride)
        return BandIntervals(lo, hi, n_q, n_k)
    bounds = torch.full((2, q_layout.rows), n_k, dtype=torch.int32, device="cpu")
    bounds[:, :n_q] = _count_below(kv_layout, j, _key_ranges(rule, q_layout, i, kv_layout.seq_len)[:, :n_q])
    return ArrayIntervals(bounds[0], bounds[1], n_q, n_k)


def gives_bands(rule: MaskRule, q_layout: Layout, kv_layout: Layout) -> bool:
    """Whether the blocks of a rule are bands: one piece a chunk, of equal strides, and no documents."""
    q_pieces, k_pieces = q_layout.pieces(0), kv_layout.pieces(0)
    return (
        rule.documents is None
        and len(q_pieces) == len(k_pieces) == 1
        and q_pieces[0].stride == k_pieces[0].stride
    )


@lru_cache(maxsize=64)
def visible_blocks(rule: MaskRule, q_layout: Layout, kv_layout: Layout) -> Visibility:
    """Which pairs of chunks have a query that sees a key."""
    chunks = range(q_layout.chunks)
    if gives_bands(rule, q_layout, kv_layout):
        return _visible_bands(rule, q_layout, kv_layout)
    runs = _Runs.of(kv_layout)

    def seen_by(i: int) -> int:
        if not q_layout.rows_in(i):  # of a token that is decoded, most chunks
            return 0
        return runs.met_by(_merged_ranges(rule, q_layout, i, kv_layout.seq_len))

    return Visibility(tuple(map(seen_by, chunks)))


def _visible_bands(rule: MaskRule, q_layout: Layout, kv_layout: Layout) -> Visibility:
    """All bands at once: as ``block_intervals`` and ``BandIntervals.is_empty`` have it."""
    chunks = range(q_layout.chunks)

    def column(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device="cpu")[:, None]

    q_offset, k_offset = (
        column(layout.pieces(chunk)[0].offset for chunk in chunks) for layout in (q_layout, kv_layout)
    )
    n_q, n_k = (column(map(layout.rows_in, chunks)) for layout in (q_layout, kv_layout))
    offset = q_offset - k_offset.mT + kv_layout.seq_len - q_layout.seq_len
    stride = q_layout.pieces(0)[0].stride
    visible = (n_q > 0) & (n_k.mT > 0)
    lo = hi = None
    if rule.right is not None:
        lo = -((rule.right + offset) // stride)
        visible &= lo <= n_q - 1
    if rule.left is not None:
        hi = (rule.left - offset) // stride
        visible &= hi >= 1 - n_k.mT
    if lo is not None and hi is not None:
        visible &= lo <= hi
    return Visibility(tuple(int("".join(map(str, row[::-1])), 2) for row in visible.int().tolist()))


@dataclass(frozen=True)
class _Runs:
    """Key positions cut where the chunk changes: run r holds positions below ``ends[r]`` and at or above the
    end before it, and belongs to chunk ``owner[r]``. A striped layout repeats its runs of one position."""

    ends: Tensor
    owner: tuple[int, ...]
    period: int | None

    @classmethod
    def of(cls, layout: Layout) -> _Runs:
        if layout.kind == "striped":
            ends = torch.arange(1, 2 * layout.chunks + 1, dtype=torch.int64, device="cpu")
            return cls(ends, tuple(range(layout.chunks)) * 2, layout.chunks)
        pieces = sorted((p.offset + p.length, c) for c in range(layout.chunks) for p in layout.pieces(c))
        ends = torch.tensor([end for end, _ in pieces], dtype=torch.int64, device="cpu")
        return cls(ends, tuple(chunk for _, chunk in pieces), None)

    def met_by(self, ranges: Tensor) -> int:
        """The chunks that some of the ranges (first and end, [2, n]) meet, as bits."""
        first, end = ranges[:, ranges[0] < ranges[1]]
        if self.period is not None:
            turn = first - first % self.period
            first, end = first - turn, torch.minimum(end - turn, first - turn + self.period)
        change = torch.zeros(len(self.ends) + 1, dtype=torch.int64, device="cpu")
        for edge, sign in ((first, 1), (end - 1, -1)):
            run = torch.searchsorted(self.ends, edge, right=True)
            change += sign * torch.bincount(run + (sign < 0), minlength=len(change))
        met = change.cumsum(0).tolist()
        return sum(1 << chunk for chunk in {c for c, n in zip(self.owner, met, strict=False) if n > 0})


class BlockMasks:
    """The intervals of one rule for pairs of chunks, each made once and kept.

    A rank asks for P pairs of at most 8 S / P bytes each, so one of these holds at most 8 S bytes.
    """

    def __init__(self, rule: MaskRule, q_layout: Layout, kv_layout: Layout) -> None:
        self.rule, self.q_layout, self.kv_layout = rule, q_layout, kv_layout
        self._known: dict[tuple[int, int], Intervals] = {}

    @property
    def gives_plain_blocks(self) -> bool:
        """Whether every block is a band that is bounded on the causal side alone, or not at all."""
        return self.rule.left is None and gives_bands(self.rule, self.q_layout, self.kv_layout)

    @cached_property
    def visibility(self) -> Visibility:
        """Which blocks have anything to compute."""
        return visible_blocks(self.rule, self.q_layout, self.kv_layout)

    def block(self, i: int, j: int) -> Intervals:
        """Intervals of query chunk i against key chunk j, on the CPU."""
        if (i, j) not in self._known:
            self._known[i, j] = block_intervals(self.rule, self.q_layout, i, self.kv_layout, j)
        return self._known[i, j]


@lru_cache(maxsize=64)
def chunk_positions(layout: Layout, chunk: int) -> Tensor:
    """Global positions of the real rows of a chunk, int64 on the CPU, rising. Cached: do not write to it."""
    runs = [(run.start, run.stop, run.step) for run in (piece.positions() for piece in layout.pieces(chunk))]
    position = torch.cat([torch.arange(*run, dtype=torch.int64, device="cpu") for run in runs])
    return position[: layout.rows_in(chunk)]


@lru_cache(maxsize=4)
def _key_ranges(rule: MaskRule, q_layout: Layout, i: int, kv_len: int) -> Tensor:
    """First and end [2, n_q] of the global key positions that each row of chunk i sees, both non-decreasing.

    Cached, because a rank meets its few query chunks once a key chunk; never written to.
    """
    return torch.stack(_ranges_of(rule, chunk_positions(q_layout, i), q_layout.seq_len, kv_len))


def _merged_ranges(rule: MaskRule, q_layout: Layout, i: int, kv_len: int) -> Tensor:
    """The same, or fewer ranges that cover the same keys: those of neighbours in a document lie close
    together, unless a window is narrower than the stride of the rows."""
    pieces, position = q_layout.pieces(i), chunk_positions(q_layout, i)
    if rule.left is not None and rule.right is not None and rule.left + rule.right + 1 < pieces[0].stride:
        return _key_ranges(rule, q_layout, i, kv_len)
    edges = [torch.tensor([0, pieces[0].length, len(position)], dtype=torch.int64, device="cpu")]
    if rule.documents is not None:
        edges.append(_count_below(q_layout, i, rule.documents.tables[0]))
    row = torch.cat(edges).clamp_(max=len(position)).unique()  # type: ignore[no-untyped-call]
    first, _ = _ranges_of(rule, position[row[:-1]], q_layout.seq_len, kv_len)
    _, end = _ranges_of(rule, position[row[1:] - 1], q_layout.seq_len, kv_len)
    return torch.stack([first, end])


def _ranges_of(rule: MaskRule, position: Tensor, q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    """First and end of the keys that queries at global positions see."""
    if rule.documents is None:
        low, high = torch.tensor([0, kv_len], dtype=torch.int64, device="cpu")
        aligned = position + (kv_len - q_len)
    else:
        for name, bounds, seq_len in (("seq", rule.documents.q, q_len), ("kv_seq", rule.documents.k, kv_len)):
            if bounds[-1] > seq_len:
                raise ValueError(
                    f"cu_seqlens of {name} ends at {bounds[-1]}, beyond the sequence length {seq_len}"
                )
        q_ends, starts, ends, shifts = rule.documents.tables
        document = torch.searchsorted(q_ends, position, right=True)
        low, high = starts[document], ends[document]
        aligned = position + shifts[document]
    first = low.expand_as(position) if rule.left is None else torch.clamp(aligned - rule.left, low, high)
    end = high.expand_as(position) if rule.right is None else torch.clamp(aligned + rule.right + 1, low, high)
    return first, end


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
