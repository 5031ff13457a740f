# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM102 - conditions on constants stand alone
"""Math partition of the backward: 8 warps, five matrix products a step (formulas in backward.py).

Every step leaves its loop body with no product in flight: a product pending across the loop edge makes ptxas
serialise all of them (messages C7512 and C7514) or spill.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from meshattn_kernels.hopper.masks import ARRAY, BAND, FULL, common_keys, row_ends, row_starts
from meshattn_kernels.hopper.ordered_add import dq_shared_layout, segment_of
from meshattn_kernels.hopper.shim import LOG2E, reinterpret

LOAD = gl.constexpr(1)
STORE = gl.constexpr(2)


@gluon.constexpr_function
def accumulator_layout(columns):  # 8 warps stacked over 128 rows
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, columns, 16])


@gluon.constexpr_function
def dq_layout(q_tile, d_tile):  # 64 rows feed only 4 warps: the two warpgroups split the columns
    if q_tile == 64:
        return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, d_tile // 2, 16])
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, d_tile, 16])


@gluon.jit
def product_from_rows(operand, tile, init):
    """Asynchronous init[m] + sum_d operand[n, d] * tile[m, d]  ->  fp32 [KV_TILE, tile rows]."""
    start = gl.expand_dims(init, 0).broadcast_to([operand.shape[0], tile.shape[0]])
    return warpgroup_mma(operand, tile.permute((1, 0)), start, is_async=True)


@gluon.jit
def probabilities(
    scores, first_row, first_key, rows, common_start, common_end, exp2_scale, MASK: gl.constexpr
):
    """exp2(scores * exp2_scale), 0 where the row does not see the key; fp32 [KV_TILE, query rows]."""
    KV_TILE: gl.constexpr = scores.shape[0]
    Q_ROWS: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = accumulator_layout(Q_ROWS)
    probs = gl.exp2(scores * exp2_scale)
    if MASK != FULL:
        if (first_key < common_start) | (first_key + KV_TILE > common_end):
            row = first_row + gl.arange(0, Q_ROWS, layout=gl.SliceLayout(0, LAYOUT))
            key = first_key + gl.arange(0, KV_TILE, layout=gl.SliceLayout(1, LAYOUT))
            start = row_starts(rows, row, MASK)[None, :]
            visible = (key[:, None] >= start) & (key[:, None] < row_ends(rows, row, MASK)[None, :])
            probs = gl.where(visible, probs, 0.0)  # also where the score of a hidden key overflowed
    return probs


@gluon.jit
def step_whole(
    memory, stage, dk, dv, first_row, first_key, rows, common_start, common_end, exp2_scale,
    MASK: gl.constexpr,
):  # fmt: skip
    """One step with the query tile in one piece. Returns dq (fp32 [Q_TILE, D_TILE]), dv and the pending
    dk."""
    Q_TILE: gl.constexpr = memory.q.shape[1]
    D_TILE: gl.constexpr = memory.q.shape[2]
    DV_TILE: gl.constexpr = memory.do.shape[2]
    ROW: gl.constexpr = gl.SliceLayout(0, accumulator_layout(Q_TILE))
    q = memory.q.index(stage)
    do = memory.do.index(stage)
    score_init = memory.score_init.index(stage).load(ROW)  # both rows before the first product
    dprob_init = memory.dprob_init.index(stage).load(ROW)
    scores = product_from_rows(memory.k, q, score_init)
    dprobs = product_from_rows(memory.v, do, dprob_init)
    scores = warpgroup_mma_wait(1, deps=[scores])
    probs = probabilities(scores, first_row, first_key, rows, common_start, common_end, exp2_scale, MASK)
    # No data movement: the registers of a product are those of an operand.
    probs_operand = gl.convert_layout(
        probs.to(memory.v.dtype), gl.DotOperandLayout(0, accumulator_layout(DV_TILE), 2)
    )
    dprobs = warpgroup_mma_wait(0, deps=[dprobs])
    dv = warpgroup_mma(probs_operand, do, dv, is_async=True)
    ds = (probs * dprobs).to(memory.k.dtype)
    memory.ds.store(ds)
    fence_async_shared()
    dq = gl.zeros((Q_TILE, D_TILE), gl.float32, dq_layout(Q_TILE, D_TILE))
    dq = warpgroup_mma(memory.ds.permute((1, 0)), memory.k, dq, use_acc=False, is_async=True)
    ds_operand = gl.convert_layout(ds, gl.DotOperandLayout(0, accumulator_layout(D_TILE), 2))
    dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])  # dk still runs
    return dq, dv, dk


@gluon.jit
def step_halves(
    memory, stage, dk, dv, first_row, first_key, rows, common_start, common_end, exp2_scale,
    MASK: gl.constexpr,
):  # fmt: skip
    """As step_whole, with the query tile in two halves: the second half's products overlap the first's
    exp2."""
    Q_TILE: gl.constexpr = memory.q.shape[1]
    D_TILE: gl.constexpr = memory.q.shape[2]
    DV_TILE: gl.constexpr = memory.do.shape[2]
    HALF: gl.constexpr = Q_TILE // 2
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(DV_TILE), 2)
    DS_OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(D_TILE), 2)
    ROW: gl.constexpr = gl.SliceLayout(0, accumulator_layout(HALF))
    q0 = memory.q.index(stage).slice(0, HALF, 0)
    q1 = memory.q.index(stage).slice(HALF, HALF, 0)
    do0 = memory.do.index(stage).slice(0, HALF, 0)
    do1 = memory.do.index(stage).slice(HALF, HALF, 0)
    # All rows before the first product.
    score_init0 = memory.score_init.index(stage).slice(0, HALF, 0).load(ROW)
    dprob_init0 = memory.dprob_init.index(stage).slice(0, HALF, 0).load(ROW)
    score_init1 = memory.score_init.index(stage).slice(HALF, HALF, 0).load(ROW)
    dprob_init1 = memory.dprob_init.index(stage).slice(HALF, HALF, 0).load(ROW)
    scores0 = product_from_rows(memory.k, q0, score_init0)
    dprobs0 = product_from_rows(memory.v, do0, dprob_init0)
    scores1 = product_from_rows(memory.k, q1, score_init1)
    dprobs1 = product_from_rows(memory.v, do1, dprob_init1)

    scores0 = warpgroup_mma_wait(3, deps=[scores0])
    probs = probabilities(scores0, first_row, first_key, rows, common_start, common_end, exp2_scale, MASK)
    probs_operand = gl.convert_layout(probs.to(memory.v.dtype), P_OPERAND)
    dprobs0 = warpgroup_mma_wait(2, deps=[dprobs0])
    ds = (probs * dprobs0).to(memory.k.dtype)
    memory.ds.slice(0, HALF, 1).store(ds)
    dv = warpgroup_mma(probs_operand, do0, dv, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds, DS_OPERAND), q0, dk, is_async=True)

    scores1 = warpgroup_mma_wait(3, deps=[scores1])
    probs = probabilities(
        scores1, first_row + HALF, first_key, rows, common_start, common_end, exp2_scale, MASK
    )
    probs_operand = gl.convert_layout(probs.to(memory.v.dtype), P_OPERAND)
    dprobs1 = warpgroup_mma_wait(2, deps=[dprobs1])
    ds = (probs * dprobs1).to(memory.k.dtype)
    memory.ds.slice(HALF, HALF, 1).store(ds)
    fence_async_shared()
    dv = warpgroup_mma(probs_operand, do1, dv, is_async=True)
    dq = gl.zeros((Q_TILE, D_TILE), gl.float32, dq_layout(Q_TILE, D_TILE))
    dq = warpgroup_mma(memory.ds.permute((1, 0)), memory.k, dq, use_acc=False, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds, DS_OPERAND), q1, dk, is_async=True)
    dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
    return dq, dv, dk


@gluon.jit
def add_rows(gradients, pointer, tile, kv_head, kv_tile, HEAD_DIM: gl.constexpr, FIRST: gl.constexpr):
    """Store or add a tile of dk or dv, fp32 [KV_TILE, columns], into the accumulator [B, C_k, H_kv,
    HEAD_DIM], or store it in the type of the inputs."""
    LAYOUT: gl.constexpr = tile.type.layout
    kv_heads = gradients.kv_heads
    batch = kv_head // kv_heads
    first_key = kv_tile * tile.shape[0]
    row = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    corner = (batch.to(gl.int64) * gradients.keys + first_key) * kv_heads + (kv_head - batch * kv_heads)
    at = pointer + corner * HEAD_DIM + ((row * (kv_heads * HEAD_DIM))[:, None] + column[None, :])
    mask = (first_key + row < gradients.keys)[:, None] & (column < HEAD_DIM)[None, :]
    if not FIRST:
        tile += gl.load(at, mask=mask, other=0.0)
    gl.store(at, tile.to(pointer.dtype.element_ty), mask=mask)


@gluon.jit
def store_part(pointer, tile, number, HEAD_DIM: gl.constexpr):
    """Store a tile as number ``number`` of the parts that ``prepare.add_parts_kernel`` sums."""
    LAYOUT: gl.constexpr = tile.type.layout
    KV_TILE: gl.constexpr = tile.shape[0]
    row = gl.arange(0, KV_TILE, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = pointer + number.to(gl.int64) * (KV_TILE * HEAD_DIM) + (row * HEAD_DIM)[:, None] + column[None, :]
    gl.store(at, tile, mask=(column < HEAD_DIM)[None, :].broadcast_to(tile.shape))


@gluon.jit
def add_dkv(
    gradients, dk, dv, kv_head, kv_tile, turn,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, FIRST: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Store or add dk, dv of a tile of keys. Those of a tile of several tasks (turn >= 0, only where PARTS)
    are stored as parts."""
    if not PARTS:
        add_alone(gradients, dk, dv, kv_head, kv_tile, HEAD_DIM, HEAD_DIM_V, FIRST)
    else:
        if turn < 0:
            add_alone(gradients, dk, dv, kv_head, kv_tile, HEAD_DIM, HEAD_DIM_V, FIRST)
        else:
            number = (turn * gradients.all_kv_heads + kv_head) * gradients.num_tiles + kv_tile
            store_part(gradients.dv_parts, dv, number, HEAD_DIM_V)
            store_part(gradients.dk_parts, dk, number, HEAD_DIM)


@gluon.jit
def add_alone(
    gradients, dk, dv, kv_head, kv_tile, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, FIRST: gl.constexpr
):
    if gradients.dk.dtype.element_ty != gl.float32:  # no accumulator: nothing finishes it later
        dk *= gradients.scale
    add_rows(gradients, gradients.dv, dv, kv_head, kv_tile, HEAD_DIM_V, FIRST)
    add_rows(gradients, gradients.dk, dk, kv_head, kv_tile, HEAD_DIM, FIRST)


@gluon.jit
def math_partition(
    gradients, worker_start, tasks, steps, rows, scale, memory,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, Q_HALVES: gl.constexpr, MASK: gl.constexpr,
    FIRST: gl.constexpr, GROUPED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """GROUPED: dk, dv may stay in registers from task to task; otherwise every task has LOAD and STORE."""
    STAGES: gl.constexpr = memory.q.shape[0]
    Q_TILE: gl.constexpr = memory.q.shape[1]
    D_TILE: gl.constexpr = memory.q.shape[2]
    DV_TILE: gl.constexpr = memory.do.shape[2]
    KV_TILE: gl.constexpr = memory.k.shape[0]
    DQ_SHARED: gl.constexpr = dq_shared_layout(Q_TILE, D_TILE, segment_of(HEAD_DIM))
    exp2_scale = scale * LOG2E
    worker = gl.program_id(0)
    step = 0
    tile_number = 0
    dk = gl.zeros((KV_TILE, D_TILE), gl.float32, accumulator_layout(D_TILE))
    dv = gl.zeros((KV_TILE, DV_TILE), gl.float32, accumulator_layout(DV_TILE))
    for task in range(gl.load(worker_start + worker), gl.load(worker_start + worker + 1)):
        first_step = gl.load(tasks + task * 8 + 3)
        num_steps = gl.load(tasks + task * 8 + 4)
        if not GROUPED or gl.load(tasks + task * 8 + 5) & LOAD:
            mbarrier.wait(memory.kv_full, tile_number & 1)
            dk = gl.zeros((KV_TILE, D_TILE), gl.float32, accumulator_layout(D_TILE))
            dv = gl.zeros((KV_TILE, DV_TILE), gl.float32, accumulator_layout(DV_TILE))
        first_key = 0
        first_row = 0
        common_start = 0
        common_end = 0
        if MASK != FULL:  # only the mask needs to know where the tiles lie
            first_key = gl.load(tasks + task * 8 + 2) * KV_TILE
            first_row = (gl.load(steps + first_step) & 0xFFFF) * Q_TILE
            common_start, common_end = common_keys(rows, first_row, Q_TILE, MASK)
        for t in range(num_steps):
            stage = step & (STAGES - 1)
            entry = 0
            if MASK == BAND:
                entry = gl.load(steps + first_step + t + 1)
            mbarrier.wait(memory.q_full.index(stage), (step >> 1) & 1)
            if Q_HALVES == 1:
                dq, dv, dk = step_whole(
                    memory, stage, dk, dv, first_row, first_key, rows, common_start, common_end, exp2_scale,
                    MASK,
                )  # fmt: skip
            else:
                dq, dv, dk = step_halves(
                    memory, stage, dk, dv, first_row, first_key, rows, common_start, common_end, exp2_scale,
                    MASK,
                )  # fmt: skip
            if MASK == ARRAY:  # here, for want of registers
                entry = gl.load(steps + first_step + t + 1)
            if MASK != FULL:  # for the next step; arrays are read while dk runs
                first_row = (entry & 0xFFFF) * Q_TILE
                common_start, common_end = common_keys(rows, first_row, Q_TILE, MASK)
            mbarrier.wait(memory.dq_empty, (step & 1) ^ 1)
            reinterpret(memory.dq, [Q_TILE, D_TILE], DQ_SHARED).store(dq)
            fence_async_shared()
            mbarrier.arrive(memory.dq_full, count=1)
            dk = warpgroup_mma_wait(0, deps=[dk])  # nothing in flight across the loop edge
            mbarrier.arrive(memory.q_empty.index(stage), count=1)
            step += 1
        # The table is read again: registers are dear in the loop.
        if not GROUPED or gl.load(tasks + task * 8 + 5) & STORE:
            mbarrier.arrive(memory.kv_empty, count=1)
            tile_number += 1
            kv_head = gl.load(tasks + task * 8 + 1)
            kv_tile = gl.load(tasks + task * 8 + 2)
            turn = gl.load(tasks + task * 8 + 6)
            add_dkv(gradients, dk, dv, kv_head, kv_tile, turn, HEAD_DIM, HEAD_DIM_V, FIRST, PARTS)
