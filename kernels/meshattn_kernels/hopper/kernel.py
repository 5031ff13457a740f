"""The Hopper kernels as an object: see ``meshattn_kernels.contract.AttentionKernel`` for the methods.

Accumulators: out [B, C, H, D_v] and lse [B, H, C]; dk, dv [B, C, H_kv, D or D_v]; dq [B, H, C, D] with the
columns of a row permuted (``ordered_add.column_order``), because TMA adds tiles that lie in shared memory in
register order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshattn_kernels.contract import AccumulatorKind, clear_accumulator
from meshattn_kernels.hopper.bind import bind_backward, bind_forward, finished_dkv, finished_dq, on_device
from meshattn_kernels.hopper.launch import Kept, Launch, tma_ready
from meshattn_kernels.hopper.plans import BackwardPlan, Call, backward_plan, forward_plan, number_of
from meshattn_kernels.intervals import BandIntervals, Intervals

MAX_HEAD_DIM = 128
HEAD_DIM_STEP = 16

_forward_launches: Kept[Launch] = Kept()
_backward_launches: Kept[Launch] = Kept()
_backward_plans: Kept[BackwardPlan] = Kept()


@dataclass(frozen=True)
class HopperKernel:
    """Gluon kernels for compute capability 9.0: bfloat16 and float16, head sizes that are multiples of 16 up
    to 128 (64 and 128 at full speed).

    workers             resident thread blocks, all multiprocessors by default. Bits do not depend on it.
                        Leave some multiprocessors out where another kernel (NCCL's) is resident meanwhile.
    deterministic       False adds dq in no order, as a control for measurements.
    schedule            name of a backward schedule of ``dash.py``; None is the default of the shape.
    """

    workers: int | None = None
    deterministic: bool = True
    schedule: str | None = None

    name: ClassVar[str] = "hopper"
    writes_finished: ClassVar[frozenset[AccumulatorKind]] = frozenset()

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(
                f"workers is {self.workers}; it must be at least 1, or None for all multiprocessors"
            )

    def accumulator_shapes(
        self,
        kind: AccumulatorKind,
        *,
        batch: int,
        rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        head_dim_v: int,
    ) -> dict[str, tuple[int, ...]]:
        if kind == "out":
            return {"out": (batch, rows, heads, head_dim_v), "lse": (batch, heads, rows)}
        if kind == "dq":
            return {"dq": (batch, heads, rows, head_dim)}
        return {"dk": (batch, rows, kv_heads, head_dim), "dv": (batch, rows, kv_heads, head_dim_v)}

    def finish(
        self, kind: AccumulatorKind, acc: Mapping[str, Tensor], *, dtype: torch.dtype, softmax_scale: float
    ) -> tuple[Tensor, ...]:
        if kind == "out":
            return (acc["out"].to(dtype, copy=True),)
        if kind == "dq":
            return (finished_dq(acc["dq"], dtype, float(softmax_scale)),)
        return finished_dkv(acc["dk"], acc["dv"], dtype, float(softmax_scale))

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
        q, k, v = _checked(q, softmax_scale), tma_ready(k), tma_ready(v)
        out, lse = _accumulator("out", acc["out"]), _accumulator("lse", acc["lse"])
        key = (
            *_identity(q), *_identity(k), *_identity(v), out.data_ptr(), lse.data_ptr(), q.dtype, q.device,
            _identity_of(intervals), softmax_scale, first, self.workers,
        )  # fmt: skip
        launch = _forward_launches.get(key)
        if launch is None:
            call = self._call(q, k, v, first)
            plan = forward_plan(intervals, call)
            if plan.empty:
                if first:
                    clear_accumulator(acc)
                return
            with on_device(q.device):
                launch = bind_forward(call, plan, q, k, v, out, lse, intervals, float(softmax_scale))
            _forward_launches.put(key, launch)
        with on_device(q.device):
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
        q, k, v, do = _checked(q, softmax_scale), tma_ready(k), tma_ready(v), tma_ready(do)
        device = q.device
        shapes = (q.shape, k.shape, v.shape, device, _identity_of(intervals), self.workers, self.schedule)
        plan = _backward_plans.get(shapes)
        if plan is None:
            plan = _backward_plans.put(shapes, backward_plan(intervals, self._call(q, k, v, False)))
        if plan.empty:
            if first_dq:
                clear_accumulator(dq)
            if first_dkv:
                clear_accumulator(dkv)
            return
        lse, delta = lse.contiguous(), delta.contiguous()
        accs = _accumulator("dq", dq["dq"]), _accumulator("dk", dkv["dk"]), _accumulator("dv", dkv["dv"])
        with on_device(device):
            scratch = torch.empty(plan.scratch_size, dtype=torch.float32, device=device)
            if first_dq and (plan.some_unseen or not self.deterministic):
                dq["dq"].zero_()
            key = (
                *_identity(q), *_identity(k), *_identity(v), *_identity(do), lse.data_ptr(), delta.data_ptr(),
                accs[0].data_ptr(), accs[1].data_ptr(), accs[2].data_ptr(), scratch.data_ptr(), q.dtype,
                plan.number, softmax_scale, first_dq, first_dkv, self.deterministic,
            )  # fmt: skip
            launch = _backward_launches.get(key)
            if launch is None:
                launch = bind_backward(
                    plan, (q, k, v, do), (lse, delta), accs, scratch, intervals,
                    float(softmax_scale), (first_dq, first_dkv), self.deterministic,
                )  # fmt: skip
                _backward_launches.put(key, launch)
            launch()

    def _call(self, q: Tensor, k: Tensor, v: Tensor, first: bool) -> Call:
        _check_shapes(q, k, v)
        batch, rows_q, heads, head_dim = q.shape
        _, rows_k, kv_heads, head_dim_v = v.shape
        device = q.device.index
        available = _multiprocessors(device)
        if self.workers is not None and self.workers > available:
            raise ValueError(f"workers is {self.workers}, but {q.device} has {available} multiprocessors")
        return Call(
            device, self.workers or available, batch, heads, kv_heads, rows_q, rows_k, head_dim, head_dim_v,
            first, self.schedule,
        )  # fmt: skip


def _identity(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.shape, x.stride()


def _identity_of(intervals: Intervals) -> Any:
    return intervals if isinstance(intervals, BandIntervals) else number_of(intervals)


@cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


OTHERS = "Choose kernel='triton' or kernel='reference'"


def _checked(q: Tensor, softmax_scale: float) -> Tensor:
    """q, ready for TMA. Raises ValueError for a device, type or scale that these kernels do not serve."""
    device = q.device
    if device.type != "cuda" or _capability(device.index) != (9, 0):
        where = str(device)
        if device.type == "cuda":
            where += f" with compute capability {'.'.join(map(str, _capability(device.index)))}"
        raise ValueError(f"q is on {where}; kernel 'hopper' runs on compute capability 9.0 alone. {OTHERS}")
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"q is {q.dtype}; kernel 'hopper' takes bfloat16 and float16. Cast, or: {OTHERS}")
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale is {softmax_scale}; kernel 'hopper' takes positive ones. {OTHERS}")
    return tma_ready(q)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for names, dim in (("q and k", q.shape[-1]), ("v", v.shape[-1])):
        if not HEAD_DIM_STEP <= dim <= MAX_HEAD_DIM or dim % HEAD_DIM_STEP:
            raise ValueError(
                f"{names} have head size {dim}; kernel 'hopper' takes multiples of {HEAD_DIM_STEP} up to "
                f"{MAX_HEAD_DIM}. {OTHERS}"
            )
    assert q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    assert q.shape[2] % k.shape[2] == 0 and k.shape[:3] == v.shape[:3] and q.shape[-1] == k.shape[-1]


def _accumulator(name: str, acc: Tensor) -> Tensor:
    if name != "lse" and acc.data_ptr() % 16:
        raise ValueError(
            f"accumulator {name!r} begins at an address that is no multiple of 16 bytes; align it"
        )
    assert acc.is_contiguous() and acc.dtype == torch.float32, (
        f"accumulator {name!r} is {acc.dtype} {acc.stride()}"
    )
    return acc
