"""The Hopper kernels as an object: see ``meshattn_kernels.contract.AttentionKernel`` for the methods.

Accumulators: out [B, C, H, D_v] and lse [B, H, C]; dk, dv [B, C, H_kv, D or D_v]; dq [B, H, C, D] with the columns of
a row permuted (``ordered_add.column_order``), because TMA adds tiles that lie in shared memory in register order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshattn_kernels.contract import AccumulatorKind
from meshattn_kernels.hopper.backward import backward_kernel
from meshattn_kernels.hopper.forward import forward_kernel
from meshattn_kernels.hopper.launch import Kernel, descriptor, tiles_of, tma_ready
from meshattn_kernels.hopper.ordered_add import segment_of
from meshattn_kernels.hopper.plans import (
    BAND,
    FULL,
    KV_TILE,
    BackwardPlan,
    Call,
    backward_plan,
    forward_plan,
    head_tile,
)
from meshattn_kernels.hopper.prepare import finish_dq_kernel, prepare_kernel
from meshattn_kernels.intervals import Intervals

PREPARE_BLOCK = 1024
FINISH_ROWS = 32
MAX_HEAD_DIM = 128
HEAD_DIM_STEP = 16
STAGES = 2

_forward = Kernel(forward_kernel, num_warps=4)
_backward = Kernel(backward_kernel, num_warps=8, cooperative=True)
_prepare = Kernel(prepare_kernel, num_warps=4)
_finish_dq = Kernel(finish_dq_kernel, num_warps=4)


@dataclass(frozen=True)
class HopperKernel:
    """Gluon kernels for compute capability 9.0: bfloat16 and float16, head sizes that are multiples of 16 up to 128
    (64 and 128 at full speed).

    workers             resident thread blocks, all multiprocessors by default. Bits do not depend on it. Leave some
                        multiprocessors out where another kernel (NCCL's) is resident while these run.
    deterministic       False adds dq in no order, as a control for measurements.
    schedule            name of a backward schedule of ``dash.py``; None is the default of the shape.
    """

    workers: int | None = None
    deterministic: bool = True
    schedule: str | None = None

    name: ClassVar[str] = "hopper"

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

    def clear(self, kind: AccumulatorKind, acc: Mapping[str, Tensor]) -> None:
        for name, tensor in acc.items():
            tensor.fill_(-math.inf if name == "lse" else 0.0)

    def finish(
        self, kind: AccumulatorKind, acc: Mapping[str, Tensor], *, dtype: torch.dtype, softmax_scale: float
    ) -> tuple[Tensor, ...]:
        if kind == "out":
            return (acc["out"].to(dtype, copy=True),)
        if kind == "dq":
            return (_finished_dq(acc["dq"], dtype, softmax_scale),)
        dk = torch.mul(acc["dk"], softmax_scale, out=torch.empty_like(acc["dk"], dtype=dtype))
        return dk, acc["dv"].to(dtype, copy=True)

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
        softmax_scale = float(softmax_scale)
        call = self._call(q, k, v, softmax_scale, first)
        plan = forward_plan(intervals, call)
        if plan.empty:
            if first:
                self.clear("out", acc)
            return
        out, lse = _accumulator("out", acc["out"]), _accumulator("lse", acc["lse"])
        q, k, v = tma_ready(q), tma_ready(k), tma_ready(v)
        n_q, n_k, mask = intervals.n_q, intervals.n_k, plan.mask
        d_tile, dv_tile = head_tile(call.head_dim), head_tile(call.head_dim_v)
        tiling = plan.tiling
        with _on_device(q.device):
            _forward(
                call.device,
                plan.workers,
                (
                    tiles_of(q, n_q, 64, d_tile), tiles_of(k, n_k, KV_TILE, d_tile), tiles_of(v, n_k, KV_TILE, dv_tile),
                    out, lse, mask.start, mask.end, plan.worker_start, plan.tasks,
                    mask.lo, mask.hi, n_q, n_k, call.rows_q, call.heads, softmax_scale,
                ),
                {
                    "CONSUMERS": tiling.consumers, "KV_TILE": KV_TILE, "D_TILE": d_tile, "DV_TILE": dv_tile,
                    "HEAD_DIM_V": call.head_dim_v, "STAGES": tiling.stages, "CARRY_PROBS": tiling.carry_probs,
                    "MASK": mask.kind, "FIRST": first,
                },
                q.dtype,
            )  # fmt: skip

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
        softmax_scale = float(softmax_scale)
        call = self._call(q, k, v, softmax_scale, False)
        plan = backward_plan(intervals, call)
        if plan.empty:
            if first_dq:
                self.clear("dq", dq)
            if first_dkv:
                self.clear("dkv", dkv)
            return
        with _on_device(q.device):
            if first_dq and (len(plan.table.unseen) or not self.deterministic):
                dq["dq"].zero_()
            self._launch_backward(
                call,
                plan,
                (q, k, v, do),
                lse,
                delta,
                dq["dq"],
                dkv,
                intervals,
                softmax_scale,
                first_dq,
                first_dkv,
            )

    def _launch_backward(
        self,
        call: Call,
        plan: BackwardPlan,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor],
        lse: Tensor,
        delta: Tensor,
        dq: Tensor,
        dkv: Mapping[str, Tensor],
        intervals: Intervals,
        softmax_scale: float,
        first_dq: bool,
        first_dkv: bool,
    ) -> None:
        q, k, v, do = map(tma_ready, inputs)
        dq, dk, dv = _accumulator("dq", dq), _accumulator("dk", dkv["dk"]), _accumulator("dv", dkv["dv"])
        table, mask, q_tile = plan.table, plan.mask, plan.q_tile
        n_q, n_k = intervals.n_q, intervals.n_k
        d_tile, dv_tile = head_tile(call.head_dim), head_tile(call.head_dim_v)
        padded_rows = table.query_tiles * q_tile
        num_rows = table.heads * padded_rows
        num_counters = table.heads * table.query_tiles
        shared = table.max_dkv_turns > 1
        all_counters = num_counters + (table.kv_heads * table.kv_tiles if shared else 0)
        init = torch.empty(2 * num_rows, dtype=torch.float32, device=q.device)
        counters = torch.empty(all_counters, dtype=torch.int32, device=q.device)
        _prepare(
            call.device,
            -(-max(num_rows, all_counters) // PREPARE_BLOCK),
            (
                lse.contiguous(), delta.contiguous(), init, counters,
                num_rows, padded_rows, call.rows_q, n_q, all_counters, softmax_scale,
            ),
            {"BLOCK": PREPARE_BLOCK},
        )  # fmt: skip
        segment = segment_of(call.head_dim)
        lines = call.head_dim // segment
        dq_shape = (table.heads, call.rows_q, lines, segment)
        dq_strides = (call.rows_q * call.head_dim, call.head_dim, segment, 1)
        # With head tile 64 the unmasked grouped variant spills more than the masked one costs.
        kind = BAND if mask.kind == FULL and plan.grouped and call.head_tile == 64 else mask.kind
        _backward(
            call.device,
            table.workers,
            (
                tiles_of(q, n_q, q_tile, d_tile), tiles_of(do, n_q, q_tile, dv_tile),
                tiles_of(k, n_k, KV_TILE, d_tile), tiles_of(v, n_k, KV_TILE, dv_tile),
                descriptor(dq, dq_shape, dq_strides, (1, q_tile, d_tile // segment, segment)),
                descriptor(init, (2 * num_rows,), (1,), (q_tile,)),
                dk, dv, mask.start, mask.end, counters, counters[num_counters:] if shared else counters,
                table.worker_start, table.tasks, table.steps,
                mask.lo, mask.hi, n_q, n_k, call.heads, call.kv_heads, call.rows_k,
                table.query_tiles, table.kv_tiles, num_rows, softmax_scale,
            ),
            {
                "Q_TILE": q_tile, "KV_TILE": KV_TILE, "D_TILE": d_tile, "DV_TILE": dv_tile,
                "HEAD_DIM": call.head_dim, "HEAD_DIM_V": call.head_dim_v, "STAGES": STAGES,
                "Q_HALVES": q_tile // 64, "MASK": kind, "FIRST_DQ": first_dq, "FIRST_DKV": first_dkv,
                "GROUPED": plan.grouped, "SHARED": shared, "ORDERED": self.deterministic,
            },
            q.dtype,
        )  # fmt: skip

    def _call(self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, first: bool) -> Call:
        _check(q, k, v, softmax_scale)
        batch, rows_q, heads, head_dim = q.shape
        _, rows_k, kv_heads, head_dim_v = v.shape
        device = q.device.index
        available = _multiprocessors(device)
        if self.workers is not None and self.workers > available:
            raise ValueError(f"workers is {self.workers}, but {q.device} has {available} multiprocessors")
        return Call(
            device, self.workers or available, batch, heads, kv_heads, rows_q, rows_k, head_dim, head_dim_v, first,
            self.schedule,
        )  # fmt: skip


@lru_cache(maxsize=None)
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=None)
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _on_device(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


OTHERS = "Choose kernel='triton' or kernel='reference'"


def _check(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> None:
    """Raise ValueError for what these kernels do not serve: device, type, head size, sign of the scale."""
    if q.device.type != "cuda" or _capability(q.device.index) != (9, 0):
        where = q.device.type
        if q.device.type == "cuda":
            where = f"{q.device} with compute capability {'.'.join(map(str, _capability(q.device.index)))}"
        raise ValueError(f"q is on {where}; kernel 'hopper' runs on compute capability 9.0 alone. {OTHERS}")
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"q is {q.dtype}; kernel 'hopper' takes bfloat16 and float16. Cast, or: {OTHERS}")
    for names, dim in (("q and k", q.shape[-1]), ("v", v.shape[-1])):
        if not HEAD_DIM_STEP <= dim <= MAX_HEAD_DIM or dim % HEAD_DIM_STEP:
            raise ValueError(
                f"{names} have head size {dim}; kernel 'hopper' takes multiples of {HEAD_DIM_STEP} up to "
                f"{MAX_HEAD_DIM}. {OTHERS}"
            )
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale is {softmax_scale}; kernel 'hopper' takes positive ones. {OTHERS}")
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


def _finished_dq(acc: Tensor, dtype: torch.dtype, softmax_scale: float) -> Tensor:
    batch, heads, rows, head_dim = acc.shape
    dq = torch.empty((batch, rows, heads, head_dim), dtype=dtype, device=acc.device)
    if acc.numel():
        with _on_device(acc.device):
            _finish_dq(
                acc.device.index,
                batch * heads * -(-rows // FINISH_ROWS),
                (acc, dq, rows, heads, float(softmax_scale)),
                {
                    "HEAD_DIM": head_dim, "D_TILE": head_tile(head_dim), "SEGMENT": segment_of(head_dim),
                    "ROWS": FINISH_ROWS,
                },
                dtype,
            )  # fmt: skip
    return dq
