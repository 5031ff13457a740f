"""A kernel over blocks of keys, one after the other, as the engine calls it: for the tests of all kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cases import Inputs, Results
from meshattn_kernels import UNBOUNDED, ArrayIntervals, BandIntervals, Intervals, accumulator_dtype
from meshattn_kernels.dropout import Positions

Block = tuple[slice, Intervals]
"""A range of the keys, and which of them each query sees."""
Accumulator = dict[str, Tensor]
New = Callable[[Any, Tensor, Tensor, Tensor], Accumulator]
"""An accumulator of a kind, for q and for the keys and values of a block."""

WITHOUT_PAIRS: dict[str, Intervals] = {
    "no band": BandIntervals(3, 2, 4, 5),
    "out of reach": BandIntervals(9, UNBOUNDED, 4, 5),
    "no query": BandIntervals(-UNBOUNDED, UNBOUNDED, 0, 5),
    "no key": BandIntervals(-UNBOUNDED, UNBOUNDED, 4, 0),
    "arrays": ArrayIntervals(*torch.tensor([[0, 2, 2, 5], [0, 2, 2, 5]], dtype=torch.int32), 4, 5),
    "arrays without key": ArrayIntervals(*torch.zeros(2, 4, dtype=torch.int32), 4, 0),
}
"""Of blocks of 4 queries and 5 keys."""


def nan_accumulator(kernel: Any, kind: str, q: Tensor, k: Tensor, v: Tensor, rows: int) -> Accumulator:
    """Cut out of one flat buffer, as the caller of a kernel does; memory starts as NaN."""
    sizes = kernel.accumulator_shapes(
        kind,
        batch=len(q),
        rows=rows,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
    )
    lengths = list(map(math.prod, sizes.values()))
    buffer = torch.full((sum(lengths),), math.nan, dtype=accumulator_dtype(q.dtype), device=q.device)
    pieces = buffer.split(lengths)
    return {name: piece.view(size) for (name, size), piece in zip(sizes.items(), pieces, strict=True)}


def cut(whole: BandIntervals, cuts: Sequence[int]) -> list[Block]:
    """The blocks of keys between neighbouring ``cuts``, of which a query sees what ``whole`` lets it see."""
    return [
        (
            slice(t0, t1),
            BandIntervals(max(whole.lo + t0, -UNBOUNDED), min(whole.hi + t0, UNBOUNDED), whole.n_q, t1 - t0),
        )
        for t0, t1 in pairwise(cuts)
    ]


def of_keys(kernel: Any, keys: slice) -> Any:
    """``kernel`` for these of the keys, whose positions its dropout counts with."""
    dropout, t0 = getattr(kernel, "dropout", None), keys.start
    if dropout is None or not t0:
        return kernel
    whole = dropout.keys
    gap = (whole.split - t0, whole.jump) if t0 < whole.split else ()
    positions = Positions(int(whole.of(t0, t0 + 1)), whole.stride, *gap)
    return replace(kernel, dropout=replace(dropout, keys=positions))


def forward_over(kernel: Any, inputs: Inputs, blocks: Sequence[Block], scale: float, new: New) -> Accumulator:
    """out and lse of all blocks, not finished."""
    q, k, v, _ = inputs
    acc = new("out", q, k, v)
    for n, (keys, intervals) in enumerate(blocks):
        one = of_keys(kernel, keys)
        one.forward(q, k[:, keys], v[:, keys], acc, intervals, softmax_scale=scale, first=n == 0)
    return acc


def run_over(kernel: Any, inputs: Inputs, blocks: Sequence[Block], scale: float, new: New) -> Results:
    """Forward and backward; dk and dv stand in the order of the blocks."""
    q, k, v, do = inputs
    acc = forward_over(kernel, inputs, blocks, scale, new)
    delta = (acc["out"] * do.nan_to_num()).sum(-1).transpose(1, 2)
    dq, gradients = new("dq", q, k, v), []
    for n, (keys, intervals) in enumerate(blocks):
        k_block, v_block = k[:, keys], v[:, keys]
        dkv = new("dkv", q, k_block, v_block)
        of_keys(kernel, keys).backward(
            q, k_block, v_block, do, acc["lse"], delta, dq, dkv, intervals,
            softmax_scale=scale, first_dq=n == 0, first_dkv=True,
        )  # fmt: skip
        gradients.append(kernel.finish("dkv", dkv, dtype=q.dtype, softmax_scale=scale))
    (out,) = kernel.finish("out", acc, dtype=q.dtype, softmax_scale=scale)
    (dq_out,) = kernel.finish("dq", dq, dtype=q.dtype, softmax_scale=scale)
    dk, dv = (torch.cat(parts, dim=1) for parts in zip(*gradients, strict=True))
    return Results(out, acc["lse"], dq_out, dk, dv)
