"""Kernels made of a foreign attention that knows two masks: none, and the plain causal one of a square.

A causal block of ours, in which row s sees the keys up to s - lo, is cut into at most three pieces that such
an attention can compute. With r0 the first row that sees a key and t0 = r0 - lo:

          keys 0 ..      t0 ..          n_k
    r0    +-------------+--------------+
          |   left:     |  square:     |      the rows before r0 see nothing; rows and keys of the square
          |   all keys  |  row i sees  |      are equally many, so that one of the two ends of it is an end
          |             |  keys 0 .. i |      of the block
          +-------------+--------------+
          |   below: all keys          |
    n_q   +----------------------------+

Partial results of the pieces are merged, gradients added, into accumulators with rows first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from meshattn_kernels.contract import (
    AccumulatorKind,
    ChunkSizes,
    Shapes,
    add_accumulator,
    clear_accumulator,
    delivered,
    rows_first,
    without_lse,
)
from meshattn_kernels.intervals import BandIntervals, Intervals
from meshattn_kernels.merge import merge_partial


@dataclass(frozen=True)
class Piece:
    """Rows and keys of a block; with ``causal``, equally many, row i of them sees the keys 0 .. i of them."""

    rows: slice
    keys: slice
    causal: bool


def pieces_of(intervals: Intervals, kernel: str) -> tuple[Piece, ...]:
    """A block in pieces, none of them empty. Raises ValueError for what the kernel of this name cannot do."""
    if not isinstance(intervals, BandIntervals):
        raise ValueError(
            f"kernel {kernel!r} takes full and causal blocks, but here every row has an interval of its own"
        )
    n_q, n_k = intervals.n_q, intervals.n_k
    if intervals.is_empty:
        return ()
    if intervals.hi < n_q - 1:
        raise ValueError(
            f"kernel {kernel!r} takes full and causal blocks, but the last row does not see the first keys: "
            f"{intervals}"
        )
    r0 = max(intervals.lo, 0)
    t0 = r0 - intervals.lo
    if t0 >= n_k - 1:
        return (Piece(slice(r0, n_q), slice(0, n_k), False),)
    size = min(n_q - r0, n_k - t0)
    square = slice(r0, r0 + size)
    pieces = [Piece(square, slice(t0, t0 + size), size > 1)]
    if t0 > 0:
        pieces.append(Piece(square, slice(0, t0), False))
    if square.stop < n_q:
        pieces.append(Piece(slice(square.stop, n_q), slice(0, n_k), False))
    return tuple(pieces)


class PlainBlocks:
    """All of ``meshattn_kernels.contract.AttentionKernel`` but the two passes over a piece."""

    name: ClassVar[str]
    writes_finished: ClassVar[frozenset[AccumulatorKind]] = frozenset()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """out [B, R, H, D_v] in any type and lse [B, H, R] in the accumulator type, of one piece: q [B, R, H,
        D], k [B, T, H_kv, D], v [B, T, H_kv, D_v]."""
        raise NotImplementedError

    def gradients(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        lse: Tensor,
        delta: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of one piece, shaped like q, k and v, in any type; lse and delta [B, H, R] are those
        of the whole rows."""
        raise NotImplementedError

    def accumulator_shapes(self, kind: AccumulatorKind, **sizes: Unpack[ChunkSizes]) -> Shapes:
        return rows_first(kind, **sizes)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        acc: Mapping[str, Tensor],
        intervals: Intervals,
        *,
        softmax_scale: float,
        first: bool,
    ) -> None:
        pieces = pieces_of(intervals, self.name)
        if first:
            clear_accumulator(acc)
        for piece in pieces:
            rows, keys = piece.rows, piece.keys
            out, lse = self.attend(
                q[:, rows], k[:, keys], v[:, keys], softmax_scale=softmax_scale, causal=piece.causal
            )
            merge_partial(acc["out"][:, rows], acc["lse"][:, :, rows], out, lse)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        lse: Tensor,
        delta: Tensor,
        dq: Mapping[str, Tensor],
        dkv: Mapping[str, Tensor],
        intervals: Intervals,
        *,
        softmax_scale: float,
        first_dq: bool,
        first_dkv: bool,
    ) -> None:
        pieces = pieces_of(intervals, self.name)
        if first_dq:
            clear_accumulator(dq)
        if first_dkv:
            clear_accumulator(dkv)
        for piece in pieces:
            rows, keys = piece.rows, piece.keys
            parts = self.gradients(
                q[:, rows],
                k[:, keys],
                v[:, keys],
                do[:, rows],
                lse[:, :, rows],
                delta[:, :, rows],
                softmax_scale=softmax_scale,
                causal=piece.causal,
            )
            sums = dq["dq"][:, rows], dkv["dk"][:, keys], dkv["dv"][:, keys]
            for total, part in zip(sums, parts, strict=True):
                total.add_(part)

    def finish(
        self,
        kind: AccumulatorKind,
        acc: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        softmax_scale: float,
        plus: Mapping[str, Tensor] | None = None,
        into: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        if plus is not None:
            add_accumulator(acc, plus)
        return delivered(tuple(x.to(dtype, copy=True) for x in without_lse(acc).values()), into)
