"""The Hopper kernels as an object: see ``meshattn_kernels.contract.AttentionKernel`` for the methods.

Accumulators: out [B, C, H, D_v] and lse [B, H, C]; dk, dv [B, C, H_kv, D or D_v]; dq [B, H, C, D] with the
columns of a row permuted (``ordered_add.column_order``), because TMA adds tiles that lie in shared memory in
register order. Where one block is the whole sum, out, dk and dv may be the results themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from meshattn_kernels.bound import Kept, Launch
from meshattn_kernels.contract import (
    AccumulatorKind,
    ChunkSizes,
    Shapes,
    clear_accumulator,
    delivered,
    heads_first,
    rows_first,
    written_finished,
)
from meshattn_kernels.dash.placement import NO_DELAY, Delay
from meshattn_kernels.device import multiprocessors, on_device
from meshattn_kernels.dispatch import check_call
from meshattn_kernels.hopper.bind import bind_backward, bind_forward, finished_dkv, finished_dq
from meshattn_kernels.hopper.failure import PATIENCE
from meshattn_kernels.hopper.launch import tma_ready
from meshattn_kernels.hopper.plans import (
    BackwardPlan,
    Call,
    ForwardPlan,
    backward_plan,
    forward_plan,
    number_of,
)
from meshattn_kernels.intervals import BandIntervals, Intervals
from meshattn_kernels.keeping import keep

_forwards: Kept[tuple[ForwardPlan, Kept[Launch]]] = Kept()
_backwards: Kept[tuple[BackwardPlan, Kept[Launch]]] = Kept()
"""The launches of a pass by the address of its scratch memory."""


@dataclass(frozen=True)
class HopperKernel:
    """Gluon kernels for compute capability 9.0: bfloat16 and float16, head sizes that are multiples of 16 up
    to 128 (64 and 128 at full speed).

    workers             resident thread blocks, all multiprocessors by default. Bits do not depend on it.
                        Leave some multiprocessors out where another kernel (NCCL's) is resident meanwhile.
    deterministic       False adds dq in no order, as a control for measurements.
    schedule            name of a backward schedule of ``dash``; None is the default of the shape.
    part                see ``sharing.of_part``.
    delay               see ``sharing.delay_some``.
    patience            seconds that a worker of a backward waits for its turn, at least, before it takes the
                        wait to be without end, and the GPU context with it. See ``sharing.patient``.
    """

    workers: int | None = None
    deterministic: bool = True
    schedule: str | None = None
    part: tuple[int, int] = (0, 1)
    delay: Delay = NO_DELAY
    patience: float = PATIENCE

    name: ClassVar[str] = "hopper"
    writes_finished: ClassVar[frozenset[AccumulatorKind]] = frozenset({"out", "dkv"})

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(
                f"workers is {self.workers}; it must be at least 1, or None for all multiprocessors"
            )
        if not self.patience > 0:
            raise ValueError(f"patience is {self.patience}; it must be a positive number of seconds")

    def accumulator_shapes(self, kind: AccumulatorKind, **sizes: Unpack[ChunkSizes]) -> Shapes:
        return heads_first(kind, **sizes) if kind == "dq" else rows_first(kind, **sizes)

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
        if kind == "dq":
            more, wanted = None if plus is None else plus["dq"], None if into is None else into[0]
            return (finished_dq(acc["dq"], dtype, float(softmax_scale), more, wanted),)
        results = written_finished(acc, dtype)
        if results is not None:
            return delivered(results, into)
        if kind == "out":
            return (acc["out"].to(dtype),) if into is None else (into[0].copy_(acc["out"]),)
        return finished_dkv(acc, dtype, float(softmax_scale), plus, into)

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
        out, lse = acc["out"], acc["lse"]
        key = (
            *[(x.data_ptr(), x.shape, x.stride()) for x in (q, k, v)],
            out.data_ptr(), lse.data_ptr(), q.dtype, out.dtype, q.get_device(),
            _identity_of(intervals), softmax_scale, first, self.workers, self.part, self.delay,
        )  # fmt: skip
        known = _forwards.get(key)
        if known is None:  # what follows is settled by the key: it need not be looked at again
            check_call(self.name, q, k, v, softmax_scale)
            ready = tuple(map(tma_ready, (q, k, v)))
            if any(x is not y for x, y in zip(ready, (q, k, v), strict=True)):
                again = partial(self.forward, acc=acc, intervals=intervals)
                return again(*ready, softmax_scale=softmax_scale, first=first)
            _check_accumulators(acc, q.dtype if first else torch.float32)
            call = self._call(q, k, v, first)
            plan = forward_plan(intervals, call)
            if plan.empty:
                return clear_accumulator(acc) if first else None
            known = _forwards.put(key, (plan, Kept()))
        plan, launches = known
        with on_device(q.device):
            keep(plan, plan.ready)
            scratch = torch.empty(plan.scratch_size, dtype=torch.float32, device=q.device)
            launch = launches.get(scratch.data_ptr())
            if launch is None:
                launch = launches.put(scratch.data_ptr(), bind_forward(
                    plan, q, k, v, out, lse, scratch, intervals, float(softmax_scale)
                ))  # fmt: skip
            launch()

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
        accs = dq["dq"], dkv["dk"], dkv["dv"]
        key = (
            *[(x.data_ptr(), x.shape, x.stride()) for x in (q, k, v, do, lse, delta)],
            accs[0].data_ptr(), accs[1].data_ptr(), accs[2].data_ptr(), q.dtype, accs[1].dtype,
            q.get_device(), _identity_of(intervals), softmax_scale, first_dq, first_dkv,
            self.workers, self.schedule, self.deterministic, self.part, self.patience,
        )  # fmt: skip
        known = _backwards.get(key)
        if known is None:
            check_call(self.name, q, k, v, softmax_scale)
            given = q, k, v, do, lse, delta
            ready = *map(tma_ready, given[:4]), lse.contiguous(), delta.contiguous()
            if any(x is not y for x, y in zip(ready, given, strict=True)):
                again = partial(
                    self.backward, dq=dq, dkv=dkv, intervals=intervals, softmax_scale=softmax_scale
                )
                return again(*ready, first_dq=first_dq, first_dkv=first_dkv)
            _check_accumulators(dq, torch.float32)
            _check_accumulators(dkv, q.dtype if first_dkv else torch.float32)
            plan = backward_plan(intervals, self._call(q, k, v, False))
            if plan.empty:
                for acc, first in ((dq, first_dq), (dkv, first_dkv)):
                    if first:
                        clear_accumulator(acc)
                return None
            known = _backwards.put(key, (plan, Kept()))
        plan, launches = known
        with on_device(q.device):
            keep(plan, plan.ready)
            scratch = torch.empty(plan.scratch_size, dtype=torch.float32, device=q.device)
            if first_dq and (plan.some_unseen or not self.deterministic):
                heads = plan.call.query_heads
                accs[0][:, heads.start : heads.stop].zero_()
            launch = launches.get(scratch.data_ptr())
            if launch is None:
                launch = launches.put(scratch.data_ptr(), bind_backward(
                    plan, (q, k, v, do), (lse, delta), accs, scratch, intervals,
                    float(softmax_scale), (first_dq, first_dkv), self.deterministic, self.patience,
                ))  # fmt: skip
            launch()

    def _call(self, q: Tensor, k: Tensor, v: Tensor, first: bool) -> Call:
        batch, rows_q, heads, head_dim = q.shape
        _, rows_k, kv_heads, head_dim_v = v.shape
        available = multiprocessors(q.device)
        if self.workers is not None and self.workers > available:
            raise ValueError(f"workers is {self.workers}, but {q.device} has {available} multiprocessors")
        return Call(
            q.device.index, self.workers or available, batch, heads, kv_heads, rows_q, rows_k, head_dim,
            head_dim_v, first, self.schedule, self.part, self.delay,
        )  # fmt: skip


def _identity_of(intervals: Intervals) -> Any:
    return intervals if isinstance(intervals, BandIntervals) else number_of(intervals)


def _check_accumulators(acc: Mapping[str, Tensor], result_dtype: torch.dtype) -> None:
    """``result_dtype``: that of a result written at once, where that is possible; else float32."""
    for name, x in acc.items():
        if name != "lse" and x.data_ptr() % 16:
            raise ValueError(
                f"accumulator {name!r} begins at an address that is no multiple of 16 bytes; align it"
            )
        allowed = (torch.float32,) if name == "lse" else (torch.float32, result_dtype)
        assert x.is_contiguous() and x.dtype in allowed, f"accumulator {name!r} is {x.dtype} {x.stride()}"
