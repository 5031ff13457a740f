"""What the tests of the portable kernels share: runs, dense attention with any mask, what rounding may do.

Import only where triton is, and where it is interpreted or there is a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cases import Inputs, Results, Shape
from key_blocks import Block, forward_over, nan_accumulator, run_over
from meshattn_kernels import UNBOUNDED, ArrayIntervals, BandIntervals, Intervals, accumulator_dtype
from meshattn_kernels.dropout import Dropout
from meshattn_kernels.portable.kernel import TritonDashKernel, TritonKernel
from meshattn_kernels.portable.launch import INTERPRETED
from tolerance import bound, error

DEVICE = "cpu" if INTERPRETED else "cuda"
NAN = math.nan
KERNELS = [TritonKernel(), TritonDashKernel()]
Kernel = TritonKernel | TritonDashKernel


def by_name(kernel: Kernel) -> str:
    return kernel.name


@dataclass(frozen=True)
class Run:
    """One query chunk against blocks of keys, in order; accumulator memory starts as NaN."""

    kernel: Kernel
    softmax_scale: float

    def accumulator(self, kind: str, inputs: Inputs, rows: int) -> dict[str, Tensor]:
        return nan_accumulator(self.kernel, kind, *inputs[:3], rows)

    def _new(self, kind: str, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        return nan_accumulator(self.kernel, kind, q, k, v, (k if kind == "dkv" else q).shape[1])

    def forward(self, inputs: Inputs, blocks: list[Block]) -> dict[str, Tensor]:
        return forward_over(self.kernel, inputs, blocks, self.softmax_scale, self._new)

    def __call__(self, inputs: Inputs, blocks: list[Block]) -> Results:
        """Forward and backward on the device; results on the CPU."""
        inputs = Inputs(*(x.to(DEVICE) for x in inputs))
        return Results(
            *(x.cpu() for x in run_over(self.kernel, inputs, blocks, self.softmax_scale, self._new))
        )


def probabilities(
    inputs: Inputs, visible: Tensor, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """p [B, H, S, S_k] of dense attention with the mask ``visible`` [S, S_k], and its lse [B, H, S]; both in
    the type of accumulators."""
    q, k = inputs.q, per_query_head(inputs.k, inputs.q)
    scores = torch.einsum("bshd,bthd->bhst", q, k).to(accumulator_dtype(q.dtype)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    none = ~visible.any(-1)
    scores = scores.masked_fill(~visible & ~none[:, None], -math.inf).masked_fill(none[:, None], 0.0)
    lse = scores.logsumexp(-1).masked_fill(none, -math.inf)
    return scores.softmax(-1).masked_fill(none[:, None], 0.0), lse


def per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values with as many heads as the queries."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def dense(
    inputs: Inputs,
    visible: Tensor,
    scale: float,
    dtype: torch.dtype,
    softcap: float = 0.0,
    dropout: Dropout | None = None,
) -> Results:
    """All results of dense attention in ``dtype``."""
    q, k, v, do = (x.detach().to(dtype) for x in inputs)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    p, lse = probabilities(Inputs(q, k, v, do), visible, scale, softcap)
    if dropout is not None:
        kept = dropout.kept(len(q), q.shape[2], (0, q.shape[1]), (0, k.shape[1]), q.device)
        p = p * kept / (1 - dropout.p)
    out = torch.einsum("bhst,bthd->bshd", p.to(dtype), per_query_head(v, q))
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), do))


def rounding(inputs: Inputs, visible: Tensor, scale: float) -> dict[str, float]:
    """What sums in another order than eager attention's may be wrong by, where eager is exact or lucky.

    A score is wrong by about eps * sum(|q| |k|) (eps is float32's), and lse with it; eager sums a row of one
    score in another order than others. Eager subtracts from dp the sum of p * dp, made of the same rounded
    dp: of one key it gets ds = 0. A kernel subtracts delta = sum(out * do), a sum of other terms: each of the
    two is wrong by about eps * sum(|do| |v|), which reaches dq with p |k| and dk with p |q|. Eager divides by
    the sum of its own exponentials, where a kernel's p comes from lse, which the forward rounded: it is wrong
    by up to eps / 2 * |lse|, in another direction in each of the rows that dv sums.
    """
    p, exact_lse = probabilities(Inputs(*(x.double() for x in inputs)), visible, scale)
    q, k, v, do = (x.double().abs() for x in inputs)
    scores = torch.einsum("bshd,bthd->bhst", q, per_query_head(k, q)) * visible
    weight = 2 * p * torch.einsum("bshd,bthd->bhst", do, per_query_head(v, q))
    dq = torch.einsum("bhst,bthd->bshd", weight, per_query_head(k, q))
    dk = torch.einsum("bhst,bshd->bthd", weight, q).unflatten(2, (k.shape[2], -1)).sum(3)
    square = (p * exact_lse.nan_to_num(neginf=0.0)[..., None]).square()
    dv = torch.einsum("bhst,bshd->bthd", square, do.square()).unflatten(2, (k.shape[2], -1)).sum(3).sqrt()
    terms = {"lse": scores * scale, "dq": dq * scale, "dk": dk * scale, "dv": dv}
    return {name: torch.finfo(torch.float32).eps * float(term.max()) for name, term in terms.items()}


def visible_pairs(rows: int, keys: int, blocks: list[Block]) -> Tensor:
    visible = torch.zeros(rows, keys, dtype=torch.bool)
    for span, intervals in blocks:
        start, end = intervals.bounds(rows)
        key = torch.arange(len(range(keys)[span]))
        visible[:, span] = (key >= start[:, None]) & (key < end[:, None])
    return visible


def check(kernel: Kernel, inputs: Inputs, blocks: list[Block], scale: float = 0.3) -> Results:
    """Compare with dense attention of the same keys, on the same device; returns what the kernel gave.

    What rounding leaves is estimated without softcap and dropout, and doubled where they are.
    """
    actual = Run(kernel, scale)(inputs, blocks)
    order = torch.cat([torch.arange(inputs.k.shape[1])[span] for span, _ in blocks])
    actual = actual._replace(dk=actual.dk[:, order.argsort()], dv=actual.dv[:, order.argsort()])
    visible = visible_pairs(inputs.q.shape[1], inputs.k.shape[1], blocks).to(DEVICE)
    inputs = Inputs(*(x.to(DEVICE) for x in inputs))
    oracle, eager = (
        dense(inputs, visible, scale, dtype, kernel.softcap, kernel.dropout)
        for dtype in (torch.float64, inputs.q.dtype)
    )
    left, slack = rounding(inputs, visible, scale), 2.0 if kernel.softcap or kernel.dropout else 1.0
    for name in Results._fields:
        ours, exact, same_type = (getattr(results, name) for results in (actual, oracle, eager))
        found, allowed = error(ours, exact), bound(exact, ours.dtype, same_type) + slack * left.get(name, 0.0)
        assert found <= allowed, f"{name}: error {found:.3e} > {allowed:.3e} ({ours.dtype})"
    return actual


def full(shape: Shape) -> BandIntervals:
    return BandIntervals(-UNBOUNDED, UNBOUNDED, shape.S, shape.seq_len_k)


def causal(shape: Shape) -> BandIntervals:
    return BandIntervals(shape.S - shape.seq_len_k, UNBOUNDED, shape.S, shape.seq_len_k)


def window(shape: Shape) -> BandIntervals:
    """A band that the last rows are beyond, if there are more rows than keys."""
    return BandIntervals(-5, 9, shape.S, shape.seq_len_k)


def as_arrays(intervals: Intervals, rows: int) -> ArrayIntervals:
    return ArrayIntervals(*intervals.bounds(rows), intervals.n_q, intervals.n_k)


def random_arrays(rows: int, keys: int, seed: int = 0) -> ArrayIntervals:
    """Non-decreasing bounds; about a third of the rows is empty, alone and in runs."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, keys + 1, (rows,), generator=generator).sort().values
    end = (start + torch.randint(0, keys // 2 + 1, (rows,), generator=generator)).clamp(max=keys)
    end = torch.cummax(end, 0).values
    empty = torch.rand(rows, generator=generator) < 0.2
    empty[rows // 3 : rows // 3 + rows // 8] = True
    # An empty row takes its end as start, and so may rows after it have to.
    start = torch.cummax(torch.where(empty, end, start), 0).values
    return ArrayIntervals(start.int(), torch.maximum(start, end).int(), rows, keys)


SMALL = [
    (Shape(B=1, S=37, H=2, H_kv=1, D=24, D_v=16, S_k=41), torch.bfloat16, causal),
    (Shape(B=2, S=19, H=2, H_kv=2, D=16, S_k=35), torch.float32, window),
    (Shape(B=1, S=34, H=3, H_kv=1, D=16, D_v=40, S_k=18), torch.float16, full),
]
LARGE = [
    (Shape(B=2, S=S, H=H, H_kv=H_kv, D=D, D_v=D_v, S_k=S_k), dtype, rule)
    for S, S_k, H, H_kv, D, D_v in (
        (300, 421, 4, 2, 64, 64),
        (517, 517, 2, 2, 128, 128),
        (700, 333, 8, 1, 128, 64),
        (257, 391, 2, 1, 256, 256),
        (129, 255, 6, 2, 40, 96),
        (131, 205, 6, 3, 40, 24),
        (1, 190, 2, 2, 8, 16),
        (190, 1, 2, 2, 192, 128),
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for rule in (full, causal, window)
]
