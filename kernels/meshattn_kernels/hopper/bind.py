"""From a plan and tensors to a launch: which arguments and constants each kernel gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshattn_kernels.bound import Kept, Launch
from meshattn_kernels.device import on_device
from meshattn_kernels.hopper.backward import backward_kernel
from meshattn_kernels.hopper.failure import mailbox
from meshattn_kernels.hopper.forward import forward_kernel
from meshattn_kernels.hopper.join import join_parts_kernel
from meshattn_kernels.hopper.launch import Kernel, descriptor, tiles_of
from meshattn_kernels.hopper.ordered_add import segment_of
from meshattn_kernels.hopper.plans import (
    CONSUMER_ROWS,
    KV_TILE,
    BackwardPlan,
    ForwardPlan,
    head_tile,
    sends_dkv,
    sends_out,
)
from meshattn_kernels.hopper.prepare import (
    add_parts_kernel,
    finish_dkv_kernel,
    finish_dq_kernel,
    prepare_kernel,
)
from meshattn_kernels.intervals import Intervals

PREPARE_BLOCK = 1024
FINISH_ROWS = 64
FINISH_BLOCK = 2048
PART_ROWS = 4
JOIN_ROWS = 8
STAGES = 2

_forward = Kernel(forward_kernel, num_warps=4)
_backward = Kernel(backward_kernel, num_warps=4, cooperative=True)
_prepare = Kernel(prepare_kernel, num_warps=4)
_finish_dq = Kernel(finish_dq_kernel, num_warps=4)
_finish_dkv = Kernel(finish_dkv_kernel, num_warps=4)
_join_parts = Kernel(join_parts_kernel, num_warps=4)
_add_parts = Kernel(add_parts_kernel, num_warps=4)
_finish_launches: Kept[Launch] = Kept()


def bind_forward(
    plan: ForwardPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scratch: Tensor,
    intervals: Intervals,
    scale: float,
) -> Launch:
    call = plan.call
    out_parts, lse_parts = torch.split(scratch, list(plan.scratch_sizes))
    n_q, n_k, mask, tiling = intervals.n_q, intervals.n_k, plan.mask, plan.tiling
    d_tile, dv_tile = head_tile(call.head_dim), head_tile(call.head_dim_v)
    earlier = (out, n_q, CONSUMER_ROWS, dv_tile) if plan.staged else (k, n_k, KV_TILE, d_tile)  # unused
    by_tma = out.dtype == q.dtype and sends_out(tiling, d_tile, dv_tile)
    out_tiles = tiles_of(out, call.rows_q, CONSUMER_ROWS, dv_tile)
    launch = _forward.bind(
        call.device,
        plan.workers,
        (
            tiles_of(q, n_q, CONSUMER_ROWS, d_tile), tiles_of(k, n_k, KV_TILE, d_tile),
            tiles_of(v, n_k, KV_TILE, dv_tile), tiles_of(*earlier), out_tiles, out, lse, out_parts, lse_parts,
            mask.start, mask.end, plan.worker_start, plan.tasks,
            mask.lo, mask.hi, n_q, n_k, call.rows_q, call.heads, scale,
        ),
        {
            "CONSUMERS": tiling.consumers, "KV_TILE": KV_TILE, "D_TILE": d_tile, "DV_TILE": dv_tile,
            "HEAD_DIM_V": call.head_dim_v, "STAGES": tiling.stages, "CARRY_PROBS": tiling.carry_probs,
            "TOGETHER": tiling.together, "MASK": mask.kind, "FIRST": call.first, "PARTS": plan.num_parts > 0,
            "STAGED": plan.staged, "OUT_BY_TMA": by_tma,
        },
        q.dtype,
        out.dtype,
    )  # fmt: skip
    if not plan.num_parts:
        return _keeping([launch], plan)
    join = _join_parts.bind(
        call.device,
        len(plan.joins) * (tiling.block // JOIN_ROWS),
        (out_parts, lse_parts, plan.joins, out, lse, call.rows_q, n_q, call.heads),
        {
            "BLOCK": tiling.block, "ROWS": JOIN_ROWS, "HEAD_DIM_V": call.head_dim_v, "DV_TILE": dv_tile,
            "FIRST": call.first,
        },
        out.dtype,
    )  # fmt: skip
    return _keeping([launch, join], plan)


def backward_tiles(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Columns of a tile of q, k and of v, do. The halves of dq are 64 columns wide where query tiles have 64
    rows."""
    dv_tile = head_tile(head_dim_v)
    return max(head_tile(head_dim), dv_tile), dv_tile


def bind_backward(
    plan: BackwardPlan,
    inputs: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    accs: tuple[Tensor, ...],
    scratch: Tensor,
    intervals: Intervals,
    scale: float,
    first: tuple[bool, bool],
    ordered: bool,
    patience: float,
) -> Launch:
    call = plan.call
    (q, k, v, do), (dq, dk, dv) = inputs, accs
    table, mask, q_tile, n_q, n_k = plan.table, plan.mask, plan.q_tile, intervals.n_q, intervals.n_k
    init, counters, dk_parts, dv_parts = torch.split(scratch, list(plan.scratch_sizes))
    counters = counters.view(torch.int32)
    prepare = _prepare.bind(
        call.device,
        -(-max(plan.num_rows, plan.num_counters) // PREPARE_BLOCK),
        (
            *rows, init, counters,
            plan.num_rows, table.query_tiles * q_tile, call.rows_q, n_q, plan.num_counters, scale,
        ),
        {"BLOCK": PREPARE_BLOCK},
    )  # fmt: skip
    d_tile, dv_tile = backward_tiles(call.head_dim, call.head_dim_v)
    segment = segment_of(call.head_dim)
    dq_shape = (table.heads, call.rows_q, call.head_dim // segment, segment)
    dq_strides = (call.rows_q * call.head_dim, call.head_dim, segment, 1)
    by_tma = dk.dtype == q.dtype and sends_dkv(
        call.head_dim, call.head_dim_v, mask.kind, grouped=plan.grouped, parts=plan.parts
    )
    main = _backward.bind(
        call.device,
        table.workers,
        (
            tiles_of(q, n_q, q_tile, d_tile), tiles_of(do, n_q, q_tile, dv_tile),
            tiles_of(k, n_k, KV_TILE, d_tile), tiles_of(v, n_k, KV_TILE, dv_tile),
            descriptor(dq, dq_shape, dq_strides, (1, 64, 64 // segment, segment)),
            descriptor(init, (2 * plan.num_rows,), (1,), (q_tile,)),
            tiles_of(dk, call.rows_k, CONSUMER_ROWS, d_tile),
            tiles_of(dv, call.rows_k, CONSUMER_ROWS, dv_tile),
            dk, dv, dk_parts, dv_parts, mask.start, mask.end, counters, mailbox(patience),
            table.worker_start, table.tasks, table.steps,
            mask.lo, mask.hi, n_q, n_k, call.heads, call.kv_heads, table.kv_heads, call.rows_k,
            table.query_tiles, len(plan.parts_of_tiles), plan.first_part_tile, plan.num_rows, scale,
        ),
        {
            "Q_TILE": q_tile, "KV_TILE": KV_TILE, "D_TILE": d_tile, "DV_TILE": dv_tile,
            "HEAD_DIM": call.head_dim, "HEAD_DIM_V": call.head_dim_v, "STAGES": STAGES,
            "Q_HALVES": q_tile // 64, "MASK": mask.kind, "FIRST_DQ": first[0], "FIRST_DKV": first[1],
            "GROUPED": plan.grouped, "PARTS": plan.parts, "ORDERED": ordered, "DKV_BY_TMA": by_tma,
        },
        q.dtype,
        dk.dtype,
    )  # fmt: skip
    launches = [prepare, main]
    if plan.parts:
        launches.append(
            _add_parts.bind(
                call.device,
                table.kv_heads * len(plan.parts_of_tiles) * (KV_TILE // PART_ROWS),
                (
                    dk_parts, dv_parts, dk, dv, plan.parts_of_tiles, call.kv_heads, table.kv_heads,
                    call.rows_k, len(plan.parts_of_tiles), plan.first_part_tile, scale,
                ),
                {
                    "HEAD_DIM": call.head_dim, "HEAD_DIM_V": call.head_dim_v, "D_TILE": d_tile,
                    "DV_TILE": dv_tile, "KV_TILE": KV_TILE, "ROWS": PART_ROWS, "FIRST": first[1],
                },
                dk.dtype,
            )
        )  # fmt: skip
    return _keeping(launches, plan)


def _keeping(launches: list[Launch], plan: ForwardPlan | BackwardPlan) -> Launch:
    """One launch after the other, with the plan whose tables they read."""

    def kept(plan: ForwardPlan | BackwardPlan = plan) -> None:
        for launch in launches:
            launch()

    return kept


def finished_dq(
    acc: Tensor, dtype: torch.dtype, scale: float, plus: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    batch, heads, rows, head_dim = acc.shape
    dq = acc.new_empty((batch, rows, heads, head_dim), dtype=dtype) if into is None else into
    if acc.numel():
        more = acc if plus is None else plus  # not read without PLUS
        with on_device(acc.device):
            pointers = acc.data_ptr(), more.data_ptr(), dq.data_ptr()
            key = ("dq", *pointers, acc.shape, dtype, more.dtype, acc.device, scale)
            launch = _finish_launches.get(key) or _finish_launches.put(
                key,
                _finish_dq.bind(
                    acc.device.index,
                    batch * heads * -(-rows // FINISH_ROWS),
                    (acc, more, dq, rows, heads, scale),
                    {
                        "HEAD_DIM": head_dim, "D_TILE": head_tile(head_dim), "SEGMENT": segment_of(head_dim),
                        "ROWS": FINISH_ROWS, "PLUS": plus is not None,
                    },
                    dtype,
                    more.dtype,
                ),
            )  # fmt: skip
            launch()
    return dq


def finished_dkv(
    acc: Mapping[str, Tensor],
    dtype: torch.dtype,
    scale: float,
    plus: Mapping[str, Tensor] | None = None,
    into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    more = acc if plus is None else plus  # not read without PLUS
    dk, dv = into or [torch.empty_like(acc[name], dtype=dtype) for name in ("dk", "dv")]
    sizes = dk.numel(), dv.numel()
    if any(sizes):
        with on_device(dk.device):
            sources = acc["dk"], acc["dv"], more["dk"], more["dv"]
            pointers = *(x.data_ptr() for x in sources), dk.data_ptr(), dv.data_ptr()
            key = ("dkv", *pointers, *sizes, dtype, more["dk"].dtype, dk.device, scale)
            launch = _finish_launches.get(key) or _finish_launches.put(
                key,
                _finish_dkv.bind(
                    dk.device.index,
                    -(-max(sizes) // FINISH_BLOCK),
                    # head sizes are multiples of 16
                    (*sources, dk, dv, sizes[0] // 16, sizes[1] // 16, scale),
                    {"BLOCK": FINISH_BLOCK, "PLUS": plus is not None},
                    dtype,
                    more["dk"].dtype,
                ),
            )
            launch()
    return dk, dv
