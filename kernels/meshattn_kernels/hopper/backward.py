# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention backward for Hopper: one persistent kernel, five products, a fixed order of every sum.

A task is one tile of keys with one query head; a step is one tile of queries of a task. A step, transposed
throughout so that P and dS come out of the tensor cores in the register layout of an A operand:

    S  = K Q^T                                  [KV_TILE, Q_TILE]
    P  = exp2(scale * log2e * S - log2e * lse)
    dP = V dO^T                                 [KV_TILE, Q_TILE]
    dS = P * (dP - delta)
    dV += P dO,  dK += dS Q                     [KV_TILE, head size], in registers
    dQ_step = dS^T K                            [Q_TILE, head size], added to fp32 memory every step

The accumulators of S and dP start at -lse / scale and at -delta (one value a query, broadcast over rows), so
that no row vector stays live beside dK and dV; 240 registers are the wall. ``prepare.py`` makes these rows.
Those of padding and of rows that see no key start at -inf and give p = 0 without a mask. The factor scale of
dK and dQ is applied when they are finished.

Five partitions: two of 4 math warps each (backward_math.py), one warp that loads by TMA, two that write dQ.
Only the writers wait for other thread blocks (ordered_add.py), in the order of a table (dash, arXiv
2601.21824).
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from meshattn_kernels.hopper.backward_math import LOAD, math_partition
from meshattn_kernels.hopper.masks import Rows
from meshattn_kernels.hopper.ordered_add import writer_partition
from meshattn_kernels.hopper.shim import aggregate, load_tile, new_barriers, reinterpret

MATH_REGISTERS, WORKER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
"""Of a thread of the math warps, and of the load and the writer warps."""


@aggregate
class Memory:
    """Shared memory of a thread block. ``*_full`` and ``*_empty`` are mbarriers."""

    k: gl.shared_memory_descriptor  # [KV_TILE, D_TILE]
    v: gl.shared_memory_descriptor  # [KV_TILE, DV_TILE]
    q: gl.shared_memory_descriptor  # [STAGES, Q_TILE, D_TILE]
    do: gl.shared_memory_descriptor  # [STAGES, Q_TILE, DV_TILE]
    score_init: gl.shared_memory_descriptor  # fp32 [STAGES, Q_TILE]
    dprob_init: gl.shared_memory_descriptor  # fp32 [STAGES, Q_TILE]
    ds: gl.shared_memory_descriptor  # [STAGES, KV_TILE, Q_TILE]
    dq: gl.shared_memory_descriptor  # fp32 [2 * buffers, 64, 64], see dq_shared_layout
    dkv: gl.shared_memory_descriptor  # [2, 64, D_TILE], a half for each partition; only if DKV_BY_TMA
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor  # [STAGES, 1]
    q_empty: gl.shared_memory_descriptor  # [STAGES, 1]
    ds_full: gl.shared_memory_descriptor  # [STAGES, 1]
    dq_full: gl.shared_memory_descriptor  # [2, 1], for steps of even and of odd number
    dq_empty: gl.shared_memory_descriptor  # [2, 1]

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, do, score_init, dprob_init, ds, dq, dkv,
        kv_full, kv_empty, q_full, q_empty, ds_full, dq_full, dq_empty,
    ):  # fmt: skip
        self.k, self.v, self.q, self.do = k, v, q, do
        self.score_init, self.dprob_init, self.ds, self.dq = score_init, dprob_init, ds, dq
        self.dkv = dkv
        self.kv_full, self.kv_empty, self.q_full, self.q_empty = kv_full, kv_empty, q_full, q_empty
        self.ds_full, self.dq_full, self.dq_empty = ds_full, dq_full, dq_empty


@aggregate
class Gradients:
    """Sizes of dk [B, C_k, H_kv, D] and dv [B, C_k, H_kv, D_v], parts of tiles that several tasks share, and
    the factor of dk."""

    dk_parts: gl.tensor
    dv_parts: gl.tensor
    keys: gl.tensor
    kv_heads: gl.tensor
    all_kv_heads: gl.tensor
    num_part_tiles: gl.tensor
    first_part_tile: gl.tensor
    scale: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, dk_parts, dv_parts, keys, kv_heads, all_kv_heads, num_part_tiles, first_part_tile, scale
    ):
        self.dk_parts, self.dv_parts = dk_parts, dv_parts
        self.keys, self.kv_heads, self.all_kv_heads = keys, kv_heads, all_kv_heads
        self.num_part_tiles, self.first_part_tile = num_part_tiles, first_part_tile
        self.scale = scale


@gluon.jit
def load_partition(
    q_desc, do_desc, k_desc, v_desc, init_desc, worker_start, tasks, steps,
    heads, kv_heads, num_q_tiles, num_rows, memory,
):  # fmt: skip
    """``init_desc``: fp32 vector of the rows that start S, and num_rows further on of those that start dP."""
    STAGES: gl.constexpr = memory.q.shape[0]
    Q_TILE: gl.constexpr = memory.q.shape[1]
    D_TILE: gl.constexpr = memory.q.shape[2]
    DV_TILE: gl.constexpr = memory.do.shape[2]
    KV_TILE: gl.constexpr = memory.k.shape[0]
    worker = gl.program_id(0)
    step = 0
    tile_number = 0
    for task in range(gl.load(worker_start + worker), gl.load(worker_start + worker + 1)):
        flat_head = gl.load(tasks + task * 8)
        first_step = gl.load(tasks + task * 8 + 3)
        num_steps = gl.load(tasks + task * 8 + 4)
        batch = flat_head // heads
        head = flat_head - batch * heads
        if gl.load(tasks + task * 8 + 5) & LOAD:
            kv_head = gl.load(tasks + task * 8 + 1) - batch * kv_heads
            key = gl.load(tasks + task * 8 + 2) * KV_TILE
            mbarrier.wait(memory.kv_empty, (tile_number & 1) ^ 1)
            mbarrier.expect(memory.kv_full, KV_TILE * (D_TILE + DV_TILE) * 2)
            load_tile(
                k_desc, [batch, kv_head, key, 0], memory.kv_full,
                reinterpret(memory.k, [1, 1, KV_TILE, D_TILE], k_desc.layout),
            )  # fmt: skip
            load_tile(
                v_desc, [batch, kv_head, key, 0], memory.kv_full,
                reinterpret(memory.v, [1, 1, KV_TILE, DV_TILE], v_desc.layout),
            )  # fmt: skip
            tile_number += 1
        entry = gl.load(steps + first_step)
        for t in range(num_steps):
            q_tile = entry & 0xFFFF
            entry = gl.load(steps + first_step + t + 1)  # ahead of its use: the table is padded at its end
            row = q_tile * Q_TILE
            init_at = (flat_head * num_q_tiles + q_tile) * Q_TILE
            stage = step % STAGES
            full = memory.q_full.index(stage)
            mbarrier.wait(memory.q_empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full, Q_TILE * (D_TILE + DV_TILE) * 2 + 2 * Q_TILE * 4)
            load_tile(
                q_desc, [batch, head, row, 0], full,
                reinterpret(memory.q.index(stage), [1, 1, Q_TILE, D_TILE], q_desc.layout),
            )  # fmt: skip
            load_tile(init_desc, [init_at], full, memory.score_init.index(stage))
            load_tile(
                do_desc, [batch, head, row, 0], full,
                reinterpret(memory.do.index(stage), [1, 1, Q_TILE, DV_TILE], do_desc.layout),
            )  # fmt: skip
            load_tile(init_desc, [num_rows + init_at], full, memory.dprob_init.index(stage))
            step += 1


@gluon.jit(
    do_not_specialize=[
        "lo", "hi", "n_q", "n_k", "heads", "kv_heads", "all_kv_heads", "num_keys",
        "num_q_tiles", "num_part_tiles", "first_part_tile", "num_rows", "scale",
    ],
    do_not_specialize_on_alignment=[
        "start_ptr", "end_ptr", "counters", "mailbox", "worker_start", "tasks", "steps",
    ],
)  # fmt: skip
def backward_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, init_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, dk_parts, dv_parts,
    start_ptr, end_ptr, counters, mailbox, worker_start, tasks, steps,
    lo, hi, n_q, n_k, heads, kv_heads, all_kv_heads, num_keys, num_q_tiles, num_part_tiles,
    first_part_tile, num_rows, scale,
    Q_TILE: gl.constexpr, KV_TILE: gl.constexpr, D_TILE: gl.constexpr, DV_TILE: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, STAGES: gl.constexpr, Q_HALVES: gl.constexpr,
    MASK: gl.constexpr, FIRST_DQ: gl.constexpr, FIRST_DKV: gl.constexpr, GROUPED: gl.constexpr,
    PARTS: gl.constexpr, ORDERED: gl.constexpr, DKV_BY_TMA: gl.constexpr,
):  # fmt: skip
    """q_desc, do_desc, k_desc, v_desc: [B, heads, rows, head size], of n_q and n_k rows, so that padding is
    read as zero. dq_desc: [B * H, C_q, D / 32, 32] (or / 16, 16). Counters are zero. FIRST_*: that
    accumulator is overwritten. GROUPED: some tasks lack LOAD or STORE. PARTS: some have a dkv turn. Not
    ORDERED: nothing waits, dq is zero before the first block; for measurements only. DKV_BY_TMA: dk and dv go
    through shared memory to ``dk_desc`` and ``dv_desc``; else these are not written."""
    TILE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    DQ_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)  # a stand-in, see dq_shared_layout
    DQ_BUFFERS: gl.constexpr = Q_HALVES  # narrow heads leave room for two, and are up to 3 % faster
    k = gl.allocate_shared_memory(k_desc.dtype, [KV_TILE, D_TILE], TILE_LAYOUT)
    dkv = k
    if DKV_BY_TMA:
        dkv = gl.allocate_shared_memory(k_desc.dtype, [2, KV_TILE // 2, D_TILE], TILE_LAYOUT)
    memory = Memory(
        k,
        gl.allocate_shared_memory(v_desc.dtype, [KV_TILE, DV_TILE], TILE_LAYOUT),
        gl.allocate_shared_memory(q_desc.dtype, [STAGES, Q_TILE, D_TILE], TILE_LAYOUT),
        gl.allocate_shared_memory(do_desc.dtype, [STAGES, Q_TILE, DV_TILE], TILE_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [STAGES, Q_TILE], init_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, Q_TILE], init_desc.layout),
        gl.allocate_shared_memory(k_desc.dtype, [STAGES, KV_TILE, Q_TILE], TILE_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [2 * DQ_BUFFERS, 64, 64], DQ_LAYOUT), dkv,
        new_barriers(1, 1).index(0), new_barriers(1, 2).index(0),
        new_barriers(STAGES, 1), new_barriers(STAGES, 2), new_barriers(STAGES, 2),
        new_barriers(2, 2), new_barriers(2, 1),
    )  # fmt: skip
    rows = Rows(start_ptr, end_ptr, lo, hi, n_q, n_k)
    gradients = Gradients(
        dk_parts, dv_parts, num_keys, kv_heads, all_kv_heads, num_part_tiles, first_part_tile, scale
    )
    dk_out, dv_out = dk_ptr, dv_ptr
    if DKV_BY_TMA:
        dk_out, dv_out = dk_desc, dv_desc
    fence_async_shared()
    gl.warp_specialize([
        (math_partition, (gl.constexpr(0), dk_out, dv_out, gradients, worker_start, tasks, steps, rows,
                          scale, memory, HEAD_DIM, HEAD_DIM_V, Q_HALVES, MASK, FIRST_DKV, GROUPED, PARTS,
                          DKV_BY_TMA)),
        (math_partition, (gl.constexpr(1), dk_out, dv_out, gradients, worker_start, tasks, steps, rows,
                          scale, memory, HEAD_DIM, HEAD_DIM_V, Q_HALVES, MASK, FIRST_DKV, GROUPED, PARTS,
                          DKV_BY_TMA)),
        (load_partition, (q_desc, do_desc, k_desc, v_desc, init_desc, worker_start, tasks, steps,
                          heads, kv_heads, num_q_tiles, num_rows, memory)),
        (writer_partition, (gl.constexpr(0), dq_desc, counters, mailbox, worker_start, tasks, steps,
                            num_q_tiles, memory, FIRST_DQ, ORDERED)),
        (writer_partition, (gl.constexpr(1), dq_desc, counters, mailbox, worker_start, tasks, steps,
                            num_q_tiles, memory, FIRST_DQ, ORDERED)),
    ], [4, 1, 1, 1], [MATH_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS])  # fmt: skip
