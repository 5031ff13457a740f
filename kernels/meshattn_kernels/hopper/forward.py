# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM102, SIM113 - conditions on constants stand alone; no enumerate here
"""Attention forward for Hopper: one persistent kernel that merges a block of keys into out and lse.

A task is one block of query rows of one head: 64 rows for each consumer. A consumer is a partition of its
own (one warpgroup), so that consumers drift apart and one does softmax while another keeps the tensor cores
busy; no barrier orders them (forward_math.py). One more warp loads by TMA. Tiles of keys are visited from the
last to the first: the diagonal of a causal mask comes at the start."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from meshattn_kernels.hopper.forward_math import TASK_FIELDS, consumer
from meshattn_kernels.hopper.masks import Rows
from meshattn_kernels.hopper.output import ROWS, Output
from meshattn_kernels.hopper.shim import aggregate, load_tile, new_barriers, reinterpret


@aggregate
class Memory:
    """Shared memory of a thread block. ``*_full`` and ``*_empty`` are mbarriers, one a consumer (q) or
    stage."""

    q: gl.shared_memory_descriptor  # [CONSUMERS, 64, D_TILE]
    k: gl.shared_memory_descriptor  # [STAGES, KV_TILE, D_TILE]
    v: gl.shared_memory_descriptor  # [STAGES, KV_TILE, DV_TILE]
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor  # [CONSUMERS, 64, DV_TILE]; only if OUT_BY_TMA
    earlier: gl.shared_memory_descriptor  # fp32 [CONSUMERS, 64, DV_TILE]; with its barriers only if STAGED
    earlier_full: gl.shared_memory_descriptor
    earlier_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty, out,
        earlier, earlier_full, earlier_empty,
    ):  # fmt: skip
        self.q, self.k, self.v = q, k, v
        self.q_full, self.q_empty, self.k_full, self.k_empty = q_full, q_empty, k_full, k_empty
        self.v_full, self.v_empty = v_full, v_empty
        self.out = out
        self.earlier, self.earlier_full, self.earlier_empty = earlier, earlier_full, earlier_empty


@gluon.jit
def load_partition(
    q_desc, k_desc, v_desc, earlier_desc, worker_start, tasks, memory,
    TOGETHER: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    D_TILE: gl.constexpr = memory.q.shape[2]
    DV_TILE: gl.constexpr = memory.v.shape[2]
    STAGES: gl.constexpr = memory.k.shape[0]
    KV_TILE: gl.constexpr = memory.k.shape[1]
    worker = gl.program_id(0)
    step = 0
    task_number = 0
    for task in range(gl.load(worker_start + worker), gl.load(worker_start + worker + 1)):
        row = tasks + task * TASK_FIELDS
        batch = gl.load(row)
        head = gl.load(row + 1)
        kv_head = gl.load(row + 2)
        block = gl.load(row + 3)
        first_tile = gl.load(row + 4)
        num_tiles = gl.load(row + 5)
        load_rows(q_desc, memory.q, memory.q_full, memory.q_empty, batch, head, block, task_number)
        for i in range(num_tiles):
            key = (first_tile + num_tiles - 1 - i) * KV_TILE
            stage = step % STAGES
            parity = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(memory.k_empty.index(stage), parity)
            if TOGETHER:
                v_full = memory.k_full.index(stage)
                mbarrier.expect(v_full, KV_TILE * (D_TILE + DV_TILE) * 2)
            else:
                v_full = memory.v_full.index(stage)
                mbarrier.expect(memory.k_full.index(stage), KV_TILE * D_TILE * 2)
            load_tile(
                k_desc, [batch, kv_head, key, 0], memory.k_full.index(stage),
                reinterpret(memory.k.index(stage), [1, 1, KV_TILE, D_TILE], k_desc.layout),
            )  # fmt: skip
            if not TOGETHER:
                mbarrier.wait(memory.v_empty.index(stage), parity)
                mbarrier.expect(v_full, KV_TILE * DV_TILE * 2)
            load_tile(
                v_desc, [batch, kv_head, key, 0], v_full,
                reinterpret(memory.v.index(stage), [1, 1, KV_TILE, DV_TILE], v_desc.layout),
            )  # fmt: skip
            step += 1
            if STAGED:  # not sooner: the room is free when the last task is done, and tiles must not wait
                if i == gl.minimum(STAGES, num_tiles) - 1:
                    load_rows(
                        earlier_desc, memory.earlier, memory.earlier_full, memory.earlier_empty,
                        batch, head, block, task_number,
                    )  # fmt: skip
        task_number += 1


@gluon.jit
def load_rows(desc, room, full, empty, batch, head, block, task_number):
    """The rows of a task to ``room`` [CONSUMERS, 64, columns], each consumer's when its last ones are done
    with."""
    CONSUMERS: gl.constexpr = room.shape[0]
    COLUMNS: gl.constexpr = room.shape[2]
    BYTES: gl.constexpr = ROWS * COLUMNS * (room.dtype.primitive_bitwidth // 8)
    for c in gl.static_range(CONSUMERS):
        mbarrier.wait(empty.index(c), (task_number & 1) ^ 1)
        mbarrier.expect(full.index(c), BYTES)
        load_tile(
            desc, [batch, head, (block * CONSUMERS + c) * ROWS, 0], full.index(c),
            reinterpret(room.index(c), [1, 1, ROWS, COLUMNS], desc.layout),
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["lo", "hi", "n_q", "n_k", "num_rows", "heads", "scale"],
    do_not_specialize_on_alignment=["lse_ptr", "lse_parts", "start_ptr", "end_ptr", "worker_start", "tasks"],
)
def forward_kernel(
    q_desc, k_desc, v_desc, earlier_desc, out_desc, out_ptr, lse_ptr, out_parts, lse_parts,
    start_ptr, end_ptr, worker_start, tasks,
    lo, hi, n_q, n_k, num_rows, heads, scale,
    CONSUMERS: gl.constexpr, KV_TILE: gl.constexpr, D_TILE: gl.constexpr, DV_TILE: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, STAGES: gl.constexpr, CARRY_PROBS: gl.constexpr, TOGETHER: gl.constexpr,
    MASK: gl.constexpr, FIRST: gl.constexpr, PARTS: gl.constexpr, STAGED: gl.constexpr,
    OUT_BY_TMA: gl.constexpr,
):  # fmt: skip
    """q_desc, k_desc, v_desc: [B, heads, rows, head size], of n_q and n_k rows, so that padding is read as
    zero. PARTS: some tasks have some of the keys of their rows only; join.py puts these parts together.
    STAGED, if there is an accumulator to merge with: TMA brings what it holds by ``earlier_desc`` (like q's)
    to shared memory meanwhile, so that no task waits for memory at its end; else that is not read.
    OUT_BY_TMA: out goes through shared memory to ``out_desc`` while the next task begins; else that is not
    written."""
    TILE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, D_TILE], TILE_LAYOUT)
    q_full = new_barriers(CONSUMERS, 1)
    earlier, earlier_full, earlier_empty = q, q_full, q_full
    out = q
    if OUT_BY_TMA:
        out = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, DV_TILE], TILE_LAYOUT)
    if STAGED:
        FP32_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
        earlier = gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS, DV_TILE], FP32_LAYOUT)
        earlier_full, earlier_empty = new_barriers(CONSUMERS, 1), new_barriers(CONSUMERS, 1)
    memory = Memory(
        q,
        gl.allocate_shared_memory(k_desc.dtype, [STAGES, KV_TILE, D_TILE], TILE_LAYOUT),
        gl.allocate_shared_memory(v_desc.dtype, [STAGES, KV_TILE, DV_TILE], TILE_LAYOUT),
        q_full, new_barriers(CONSUMERS, 1),
        new_barriers(STAGES, 1), new_barriers(STAGES, CONSUMERS),
        new_barriers(STAGES, 1), new_barriers(STAGES, CONSUMERS),
        out, earlier, earlier_full, earlier_empty,
    )  # fmt: skip
    rows = Rows(start_ptr, end_ptr, lo, hi, n_q, n_k)
    output = Output(out_ptr, lse_ptr, out_parts, lse_parts, num_rows, heads)
    fence_async_shared()
    # Argument tuples must be written inline: a tuple built before the call does not compile.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (gl.constexpr(0), output, out_desc, rows, worker_start, tasks, scale, memory,
                        HEAD_DIM_V, CARRY_PROBS, TOGETHER, MASK, FIRST, PARTS, STAGED, OUT_BY_TMA)),
            (consumer, (gl.constexpr(1), output, out_desc, rows, worker_start, tasks, scale, memory,
                        HEAD_DIM_V, CARRY_PROBS, TOGETHER, MASK, FIRST, PARTS, STAGED, OUT_BY_TMA)),
            (load_partition, (q_desc, k_desc, v_desc, earlier_desc, worker_start, tasks, memory,
                              TOGETHER, STAGED)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (gl.constexpr(0), output, out_desc, rows, worker_start, tasks, scale, memory,
                        HEAD_DIM_V, CARRY_PROBS, TOGETHER, MASK, FIRST, PARTS, STAGED, OUT_BY_TMA)),
            (consumer, (gl.constexpr(1), output, out_desc, rows, worker_start, tasks, scale, memory,
                        HEAD_DIM_V, CARRY_PROBS, TOGETHER, MASK, FIRST, PARTS, STAGED, OUT_BY_TMA)),
            (consumer, (gl.constexpr(2), output, out_desc, rows, worker_start, tasks, scale, memory,
                        HEAD_DIM_V, CARRY_PROBS, TOGETHER, MASK, FIRST, PARTS, STAGED, OUT_BY_TMA)),
            (load_partition, (q_desc, k_desc, v_desc, earlier_desc, worker_start, tasks, memory,
                              TOGETHER, STAGED)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
