"""The reference kernel: blockwise attention in plain PyTorch, on any device and for any float type.

Follows FlashAttention-2 (arXiv 2307.08691): an online softmax over key blocks that goes on from the
accumulator, and a backward that recomputes p = exp(s - lse). With s = scale * q k^T, p = exp(s - lse) and ds
= p * (do v^T - delta): dv = p^T do, dk = scale * ds^T q, dq = scale * ds k. All arithmetic is in the
accumulator type. With a softcap c the scores are c * tanh(scale * q k^T / c), and ds is times the slope of
that, 1 - tanh^2. For dropout see ``meshattn_kernels.dropout``. Temporaries are as large as a block of rows
times a block of keys, never rows times sequence.

Shapes inside: e = B * H_kv, and the g = H / H_kv query heads of a key/value head lie one after the other
along the rows of one matrix, so that grouped heads need no copy of k and v, and their gradients need no sum
of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Unpack

import torch
from einops import rearrange
from torch import Tensor

from meshattn_kernels.contract import (
    AccumulatorKind,
    ChunkSizes,
    Shapes,
    add_accumulator,
    clear_accumulator,
    delivered,
    heads_first,
)
from meshattn_kernels.dropout import Dropout
from meshattn_kernels.intervals import Intervals, RowBlock
from meshattn_kernels.sharing import heads_of


@dataclass(frozen=True)
class ReferenceKernel:
    """See ``AttentionKernel`` for the methods. ``block_q`` and ``block_k`` are the rows and keys of a block,
    ``softcap`` bounds the scores (0: no bound), ``dropout`` is that of the pair of chunks, ``part`` see
    ``sharing.of_part``; not both of these."""

    block_q: int = 128
    block_k: int = 256
    softcap: float = 0.0
    dropout: Dropout | None = None
    part: tuple[int, int] = (0, 1)

    name: ClassVar[str] = "reference"
    deterministic: ClassVar[bool] = True
    writes_finished: ClassVar[frozenset[AccumulatorKind]] = frozenset()

    def __post_init__(self) -> None:
        if self.block_q < 1 or self.block_k < 1:
            raise ValueError(f"block sizes are {self.block_q} x {self.block_k}; both must be at least 1")

    def accumulator_shapes(self, kind: AccumulatorKind, **sizes: Unpack[ChunkSizes]) -> Shapes:
        return heads_first(kind, **sizes)

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
        if kind == "out":
            return delivered((acc["out"].to(dtype, copy=True),), into)
        if kind == "dq":
            return delivered((_rows_first(acc["dq"] * softmax_scale, dtype),), into)
        dk, dv = _rows_first(acc["dk"] * softmax_scale, dtype), _rows_first(acc["dv"], dtype)
        return delivered((dk, dv), into)

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
        with self._heads_of_part((q, k, v), (), (acc,)) as ((q, k, v), (acc,)):
            self._forward(q, k, v, acc, intervals, softmax_scale, first)

    def _forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        acc: Mapping[str, Tensor],
        intervals: Intervals,
        softmax_scale: float,
        first: bool,
    ) -> None:
        if first:
            clear_accumulator(acc)
        if intervals.is_empty:
            return
        out, lse = acc["out"], acc["lse"]
        kv_heads = k.shape[2]
        k_et, v_et = (_heads_first(x[:, : intervals.n_k], kv_heads, out.dtype) for x in (k, v))
        mask = _Mask(intervals, q.shape[1], q.device)
        with _accumulator_precision(q.device):
            for r0, r1, rows in self._row_blocks(intervals):
                q_er = _heads_first(q[:, r0:r1], kv_heads, out.dtype) * softmax_scale
                row_max = _fold_heads(lse[:, :, r0:r1], kv_heads)
                row_sum = torch.ones_like(row_max)
                weighted = _heads_first(out[:, r0:r1], kv_heads, out.dtype)
                for t0, t1 in self._key_blocks(rows):
                    scores, _ = self._capped(q_er @ k_et[:, t0:t1].mT)
                    scores = mask.hide(scores, r0, r1, rows, t0, t1)
                    new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
                    # A row that has seen no key yet has the maximum -inf; a pivot of 0 keeps exp at 0.
                    pivot = new_max.masked_fill(new_max == -math.inf, 0.0)
                    p = scores.sub_(pivot).exp_()
                    rescale = (row_max - pivot).exp_()
                    row_sum = row_sum * rescale + p.sum(-1, keepdim=True)
                    keep = self._keep(q, kv_heads, r0, r1, t0, t1, out.dtype)
                    kept = p if keep is None else p.mul_(keep)
                    weighted = torch.baddbmm(weighted * rescale, kept, v_et[:, t0:t1])
                    row_max = new_max
                # A row that has seen no key keeps out 0 and gets lse = -inf + log(0) = -inf.
                weighted = weighted / row_sum.masked_fill(row_sum == 0, 1.0)
                out[:, r0:r1] = rearrange(weighted, "(b h) (g r) d -> b r (h g) d", h=kv_heads, r=r1 - r0)
                lse[:, :, r0:r1] = (row_max + row_sum.log()).view(len(lse), -1, r1 - r0)

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
        chunks, per_row = (q, k, v, do), (lse, delta)
        with self._heads_of_part(chunks, per_row, (dq, dkv)) as ((q, k, v, do, lse, delta), (dq, dkv)):
            if first_dq:
                clear_accumulator(dq)
            if first_dkv:
                clear_accumulator(dkv)
            if not intervals.is_empty:
                self._backward(q, k, v, do, lse, delta, dq["dq"], dkv, intervals, softmax_scale)

    def _backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        lse: Tensor,
        delta: Tensor,
        dq: Tensor,
        dkv: Mapping[str, Tensor],
        intervals: Intervals,
        softmax_scale: float,
    ) -> None:
        kv_heads, dtype = k.shape[2], lse.dtype
        k_et, v_et = (_heads_first(x[:, : intervals.n_k], kv_heads, dtype) for x in (k, v))
        dk_et, dv_et = (dkv[name].view(-1, *dkv[name].shape[2:]) for name in ("dk", "dv"))
        mask = _Mask(intervals, q.shape[1], q.device)
        with _accumulator_precision(q.device):
            for r0, r1, rows in self._row_blocks(intervals):
                q_er, do_er = (_heads_first(x[:, r0:r1], kv_heads, dtype) for x in (q, do))
                scaled_q_er = q_er * softmax_scale
                lse_er = _fold_heads(lse[:, :, r0:r1], kv_heads)
                # exp(s - inf) = 0: a row that sees no key has no part in any gradient.
                lse_er = lse_er.masked_fill(lse_er == -math.inf, math.inf)
                delta_er = _fold_heads(delta[:, :, r0:r1], kv_heads)
                dq_er = torch.zeros_like(q_er)
                for t0, t1 in self._key_blocks(rows):
                    scores, slope = self._capped(scaled_q_er @ k_et[:, t0:t1].mT)
                    scores = mask.hide(scores, r0, r1, rows, t0, t1)
                    p = scores.sub_(lse_er).exp_()
                    dp = do_er @ v_et[:, t0:t1].mT
                    keep = self._keep(q, kv_heads, r0, r1, t0, t1, dtype)
                    dv_et[:, t0:t1].baddbmm_((p if keep is None else p * keep).mT, do_er)
                    ds = (dp if keep is None else dp.mul_(keep)).sub_(delta_er).mul_(p)
                    if slope is not None:
                        ds.mul_(slope)
                    dk_et[:, t0:t1].baddbmm_(ds.mT, q_er)
                    dq_er.baddbmm_(ds, k_et[:, t0:t1])
                dq[:, :, r0:r1] += dq_er.view(len(q), -1, r1 - r0, q.shape[-1])

    @contextmanager
    def _heads_of_part(
        self, chunks: Sequence[Tensor], per_row: Sequence[Tensor], accs: Sequence[Mapping[str, Tensor]]
    ) -> Iterator[tuple[list[Tensor], Sequence[Mapping[str, Tensor]]]]:
        """Chunks [B, C, H, ..] and rows [B, H, C] with the heads of this part, and copies of the accumulators
        with these heads, which are put back at the end."""
        if self.part == (0, 1):
            yield [*chunks, *per_row], accs
            return
        assert self.dropout is None, "dropout counts all heads"
        kv_heads = chunks[1].shape[2]
        mine = heads_of(kv_heads, self.part)

        def of_heads(x: Tensor, dim: int) -> Tensor:
            group = x.shape[dim] // kv_heads
            return x.narrow(dim, mine.start * group, len(mine) * group)

        parts = [{name: of_heads(x, 2 if name == "out" else 1) for name, x in acc.items()} for acc in accs]
        copies = [{name: x.contiguous() for name, x in acc.items()} for acc in parts]
        yield [*(of_heads(x, 2) for x in chunks), *(of_heads(x, 1) for x in per_row)], copies
        for part, copy in zip(parts, copies, strict=True):
            for name, x in copy.items():
                part[name].copy_(x)

    def _capped(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores within the softcap, and the slope there; as they are, and None, without one."""
        if not self.softcap:
            return scores, None
        bounded = scores.div_(self.softcap).tanh_()
        return bounded * self.softcap, 1 - bounded.square_()

    def _keep(
        self, q: Tensor, kv_heads: int, r0: int, r1: int, t0: int, t1: int, dtype: torch.dtype
    ) -> Tensor | None:
        """What dropout multiplies the probabilities [e, g * R, T] of a block with: 0 or 1 / (1 - p)."""
        if self.dropout is None:
            return None
        kept = self.dropout.kept(len(q), q.shape[2], (r0, r1), (t0, t1), q.device)
        return kept.view(len(q) * kv_heads, -1, t1 - t0).to(dtype).mul_(self.dropout.keep_scale)

    def _row_blocks(self, intervals: Intervals) -> Iterator[tuple[int, int, RowBlock]]:
        """The blocks of rows that see any key."""
        for r0 in range(0, intervals.n_q, self.block_q):
            r1 = min(r0 + self.block_q, intervals.n_q)
            rows = intervals.row_block(r0, r1)
            if rows.first_start < rows.last_end:
                yield r0, r1, rows

    def _key_blocks(self, rows: RowBlock) -> Iterator[tuple[int, int]]:
        """The blocks of keys that some of these rows may see."""
        for t0 in range(rows.first_start, rows.last_end, self.block_k):
            yield t0, min(t0 + self.block_k, rows.last_end)


class _Mask:
    """Sets the scores of invisible keys to -inf, and does nothing where all are visible."""

    def __init__(self, intervals: Intervals, rows: int, device: torch.device) -> None:
        self.intervals, self.rows, self.device = intervals, rows, device
        self.bounds: tuple[Tensor, Tensor] | None = None

    def hide(self, scores: Tensor, r0: int, r1: int, rows: RowBlock, t0: int, t1: int) -> Tensor:
        """In place on scores [e, g * (r1 - r0), t1 - t0]."""
        if rows.is_visible(t0, t1):
            return scores
        if self.bounds is None:
            self.bounds = self.intervals.bounds(self.rows, self.device)
        start, end = (bound[r0:r1, None] for bound in self.bounds)
        key = torch.arange(t0, t1, dtype=torch.int32, device=self.device)
        scores.view(len(scores), -1, r1 - r0, t1 - t0).masked_fill_((key < start) | (key >= end), -math.inf)
        return scores


def _accumulator_precision(device: torch.device) -> torch.autocast:
    """Autocast would make the products of float32 blocks in a lower type."""
    return torch.autocast(device.type, enabled=False)


def _heads_first(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[B, R, H, D] -> [B * H_kv, g * R, D], cast and contiguous, whatever the strides of x."""
    return rearrange(x.to(dtype), "b r (h g) d -> (b h) (g r) d", h=kv_heads).contiguous()


def _fold_heads(x: Tensor, kv_heads: int) -> Tensor:
    """[B, H, R] -> [B * H_kv, g * R, 1]."""
    return x.reshape(len(x) * kv_heads, -1, 1)


def _rows_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, C, D] -> [B, C, H, D], cast and contiguous."""
    return x.to(dtype).transpose(1, 2).contiguous()
