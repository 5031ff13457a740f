# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

"""Math partitions of the backward: five matrix products a step (formulas in backward.py).

Each of two partitions of 4 warps has half of the keys of a tile, and half of dq of every step. They meet once
a step: dq needs the dS of all keys, so each writes its part to shared memory and waits for the other's. What
a partition issues between its own part and that wait keeps the tensor cores busy, so one may be ahead of the
other, in exp2 while the other multiplies.

Every step leaves its loop body with no product in flight: a product pending across the loop edge makes ptxas
serialise all of them (messages C7512 and C7514) or spill.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from meshattn_kernels.hopper.masks import BAND, FULL, Bounds, bounds_of_keys, key_bounds
from meshattn_kernels.hopper.ordered_add import dq_shared_layout, segment_of
from meshattn_kernels.hopper.shim import LOG2E, reinterpret, store_tile

KEYS = gl.constexpr(64)
"""Keys of a partition: what one warpgroup instruction takes."""
LOAD = gl.constexpr(1)
STORE = gl.constexpr(2)


@gluon.constexpr_function
def accumulator_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def from_rows(init):
    """An accumulator fp32 [64, query rows] of rows that all start alike."""
    return gl.expand_dims(init, 0).broadcast_to([KEYS, init.shape[0]])


@gluon.jit
def issue_product(operand, tile, start):
    """Asynchronous start + sum_d operand[n, d] * tile[m, d]  ->  fp32 [64, tile rows]."""
    return warpgroup_mma(operand, tile.permute((1, 0)), start, is_async=True)


@gluon.jit
def masked(tile, hidden: gl.constexpr, first_row, first_key, rows, bounds, MASK: gl.constexpr):
    """fp32 [64, query rows], ``hidden`` where the row does not see the key."""
    Q_ROWS: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = accumulator_layout(Q_ROWS)
    if (first_row < bounds.common_start) | (first_row + Q_ROWS > bounds.common_end):
        row = first_row + gl.arange(0, Q_ROWS, layout=gl.SliceLayout(0, LAYOUT))
        first, end = bounds.start, bounds.end
        if MASK == BAND:
            key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
            first, end = key_bounds(rows, key, MASK)
        visible = (row[None, :] >= first[:, None]) & (row[None, :] < end[:, None])
        tile = gl.where(visible, tile, hidden)
    return tile


@gluon.jit
def scores_start(init, first_row, first_key, rows, bounds, MASK: gl.constexpr):
    """What the scores of a tile start at, masked where no product waits for that: -inf plus a product gives
    p = 0. With 64 query rows it is faster later."""
    start = from_rows(init)
    if MASK != FULL:
        start = masked(start, float("-inf"), first_row, first_key, rows, bounds, MASK)
    return start


@gluon.jit
def probabilities(scores, first_row, first_key, rows, bounds, exp2_scale, MASK: gl.constexpr):
    """exp2(scores * exp2_scale), 0 where the row does not see the key of a MASK; fp32 [64, query rows]."""
    probs = gl.exp2(scores * exp2_scale)
    if MASK != FULL:  # also where the score of a hidden key overflowed
        probs = masked(probs, 0.0, first_row, first_key, rows, bounds, MASK)
    return probs


@gluon.jit
def step_whole(
    INDEX: gl.constexpr, memory, stage, parity, dk, dv, first_row, first_key, rows, bounds, exp2_scale,
    MASK: gl.constexpr,
):  # fmt: skip
    """One step with the query tile in one piece. Returns this half of dq (fp32 [64, 64]), dv and dk."""
    Q_TILE: gl.constexpr = memory.q.shape[1]
    D_TILE: gl.constexpr = memory.q.shape[2]
    DV_TILE: gl.constexpr = memory.do.shape[2]
    ROW: gl.constexpr = gl.SliceLayout(0, accumulator_layout(Q_TILE))
    q = memory.q.index(stage)
    do = memory.do.index(stage)
    k = memory.k.slice(INDEX * KEYS, KEYS, 0)
    v = memory.v.slice(INDEX * KEYS, KEYS, 0)
    own_ds = memory.ds.index(stage).slice(INDEX * KEYS, KEYS, 0)
    start = from_rows(memory.score_init.index(stage).load(ROW))  # both rows before the first product
    dprob_init = memory.dprob_init.index(stage).load(ROW)
    scores = issue_product(k, q, start)
    dprobs = issue_product(v, do, from_rows(dprob_init))
    scores = warpgroup_mma_wait(1, deps=[scores])
    probs = probabilities(scores, first_row, first_key, rows, bounds, exp2_scale, MASK)
    # No data movement: the registers of a product are those of an operand.
    probs_operand = gl.convert_layout(
        probs.to(memory.v.dtype), gl.DotOperandLayout(0, accumulator_layout(DV_TILE), 2)
    )
    dprobs = warpgroup_mma_wait(0, deps=[dprobs])
    dv = warpgroup_mma(probs_operand, do, dv, is_async=True)
    ds = (probs * dprobs).to(memory.k.dtype)
    own_ds.store(ds)
    fence_async_shared()
    mbarrier.arrive(memory.ds_full.index(stage), count=1)
    ds_operand = gl.convert_layout(ds, gl.DotOperandLayout(0, accumulator_layout(D_TILE), 2))
    OWN_FIRST: gl.constexpr = MASK == FULL  # masks leave too few registers
    return last_products(INDEX, memory, stage, parity, dk, dv, ds_operand, q, OWN_FIRST)


@gluon.jit
def step_halves(
    INDEX: gl.constexpr, memory, v, stage, parity, dk, dv, first_row, first_key, rows, bounds, exp2_scale,
    MASK: gl.constexpr,
):  # fmt: skip
    """As step_whole, with the query tile in two halves: the second half's products overlap the first's
    exp2. v: this half of V, in shared memory or in registers."""
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
    k = memory.k.slice(INDEX * KEYS, KEYS, 0)
    own_ds = memory.ds.index(stage).slice(INDEX * KEYS, KEYS, 0)
    start0 = memory.score_init.index(stage).slice(0, HALF, 0).load(ROW)
    dprob_init0 = memory.dprob_init.index(stage).slice(0, HALF, 0).load(ROW)
    start0 = scores_start(start0, first_row, first_key, rows, bounds, MASK)
    start1 = memory.score_init.index(stage).slice(HALF, HALF, 0).load(ROW)
    start1 = scores_start(start1, first_row + HALF, first_key, rows, bounds, MASK)
    scores0 = issue_product(k, q0, start0)
    dprobs0 = issue_product(v, do0, from_rows(dprob_init0))
    scores1 = issue_product(k, q1, start1)

    scores0 = warpgroup_mma_wait(2, deps=[scores0])
    probs = gl.exp2(scores0 * exp2_scale)
    probs_operand = gl.convert_layout(probs.to(memory.v.dtype), P_OPERAND)
    dprobs0 = warpgroup_mma_wait(1, deps=[dprobs0])
    ds = (probs * dprobs0).to(memory.k.dtype)
    own_ds.slice(0, HALF, 1).store(ds)
    dprob_init1 = memory.dprob_init.index(stage).slice(HALF, HALF, 0).load(ROW)
    dprobs1 = issue_product(v, do1, from_rows(dprob_init1))  # only now: three accumulators live, not four
    dv = warpgroup_mma(probs_operand, do0, dv, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds, DS_OPERAND), q0, dk, is_async=True)

    scores1 = warpgroup_mma_wait(3, deps=[scores1])
    probs = gl.exp2(scores1 * exp2_scale)
    probs_operand = gl.convert_layout(probs.to(memory.v.dtype), P_OPERAND)
    dprobs1 = warpgroup_mma_wait(2, deps=[dprobs1])
    ds = (probs * dprobs1).to(memory.k.dtype)
    own_ds.slice(HALF, HALF, 1).store(ds)
    fence_async_shared()
    mbarrier.arrive(memory.ds_full.index(stage), count=1)
    dv = warpgroup_mma(probs_operand, do1, dv, is_async=True)
    ds_operand = gl.convert_layout(ds, DS_OPERAND)
    return last_products(INDEX, memory, stage, parity, dk, dv, ds_operand, q1, False)


@gluon.jit
def part_of_dq(ds, k, FIRST_KEY: gl.constexpr, dq, ADD: gl.constexpr):
    """Asynchronous dS^T K over one partition's keys, or that added to dq."""
    ds, k = ds.slice(FIRST_KEY, KEYS, 0), k.slice(FIRST_KEY, KEYS, 0)
    return warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=ADD, is_async=True)


@gluon.jit
def last_products(INDEX: gl.constexpr, memory, stage, parity, dk, dv, ds_operand, q, OWN_FIRST: gl.constexpr):
    """dk += dS q, and dS^T K for half of the query rows, or half of the columns where there are 64 rows only,
    when the other partition's dS is there. With 64 rows dk is the last and still pending: dq is stored
    meanwhile. With 128 that would spill. OWN_FIRST: what dq gets from the own dS need not wait."""
    Q_TILE: gl.constexpr = memory.q.shape[1]
    ds = memory.ds.index(stage)
    k = memory.k
    if Q_TILE == 64:
        k = k.slice(INDEX * 64, 64, 1)
    else:
        ds = ds.slice(INDEX * 64, 64, 1)
    dq = gl.zeros((64, 64), gl.float32, accumulator_layout(64))
    if Q_TILE == 64:
        if OWN_FIRST:
            dq = part_of_dq(ds, k, INDEX * KEYS, dq, False)
            mbarrier.wait(memory.ds_full.index(stage), parity)
            dq = part_of_dq(ds, k, (1 - INDEX) * KEYS, dq, True)
        else:
            mbarrier.wait(memory.ds_full.index(stage), parity)
            dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=False, is_async=True)
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
    else:
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        mbarrier.wait(memory.ds_full.index(stage), parity)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=False, is_async=True)
        dq, dv, dk = warpgroup_mma_wait(0, deps=[dq, dv, dk])
    return dq, dv, dk


@gluon.jit
def add_rows(gradients, pointer, tile, kv_head, first_key, zero, HEAD_DIM: gl.constexpr, FIRST: gl.constexpr):
    """Store or add a tile of dk or dv, fp32 [64, columns], into the accumulator [B, C_k, H_kv,
    HEAD_DIM], or store it in the type of the inputs."""
    LAYOUT: gl.constexpr = tile.type.layout
    kv_heads = gradients.kv_heads
    batch = kv_head // kv_heads
    row = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, LAYOUT)) + zero
    column = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    corner = (batch.to(gl.int64) * gradients.keys + first_key) * kv_heads + (kv_head - batch * kv_heads)
    rows = (row * (kv_heads * HEAD_DIM))[:, None]
    if HEAD_DIM & (HEAD_DIM - 1) == 0:
        at = pointer + corner * HEAD_DIM + (rows + column[None, :])
    else:  # with masked columns, sums of 32-bit offsets would be an address of its own for each of them
        at = pointer + corner * HEAD_DIM + rows + column[None, :]
    mask = (first_key + row < gradients.keys)[:, None] & (column < HEAD_DIM)[None, :]
    if not FIRST:
        tile += gl.load(at, mask=mask, other=0.0)
    gl.store(at, tile.to(pointer.dtype.element_ty), mask=mask)


@gluon.jit
def store_part(pointer, tile, first, zero, HEAD_DIM: gl.constexpr):
    """Store a tile at row ``first`` of the parts that ``prepare.add_parts_kernel`` sums."""
    LAYOUT: gl.constexpr = tile.type.layout
    row = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, LAYOUT)) + zero
    column = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = pointer + first.to(gl.int64) * HEAD_DIM + (row * HEAD_DIM)[:, None] + column[None, :]
    gl.store(at, tile, mask=(column < HEAD_DIM)[None, :].broadcast_to(tile.shape))


@gluon.jit
def add_dkv(
    INDEX: gl.constexpr, gradients, dk_out, dv_out, memory, dk, dv, task_row, KV_TILE: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, FIRST: gl.constexpr, PARTS: gl.constexpr,
    DKV_BY_TMA: gl.constexpr,
):  # fmt: skip
    """Store or add dk, dv of these keys of a tile; those of a tile of several tasks (turn >= 0, only where
    PARTS) are stored as parts. The table is read again: registers are dear in the loop."""
    kv_head = gl.load(task_row + 1)
    kv_tile = gl.load(task_row + 2)
    turn = gl.load(task_row + 6)
    # 0, which the compiler must not know: addresses computed before the loop would take its registers.
    zero = gl.load(task_row + 7)
    first_key = kv_tile * KV_TILE + INDEX * KEYS
    # With masked columns it spills less where it might be a part, though no turn says so.
    MASKED_COLUMNS: gl.constexpr = HEAD_DIM & (HEAD_DIM - 1) != 0
    if DKV_BY_TMA and not PARTS:
        send_alone(INDEX, gradients, dk_out, dv_out, memory, dk, dv, kv_head, first_key)
    elif not PARTS and not MASKED_COLUMNS:
        add_alone(gradients, dk_out, dv_out, dk, dv, kv_head, first_key, zero, HEAD_DIM, HEAD_DIM_V, FIRST)
    else:
        if turn < 0:
            if DKV_BY_TMA:
                send_alone(INDEX, gradients, dk_out, dv_out, memory, dk, dv, kv_head, first_key)
            else:
                add_alone(
                    gradients, dk_out, dv_out, dk, dv, kv_head, first_key, zero, HEAD_DIM, HEAD_DIM_V, FIRST
                )
        else:
            number = (turn * gradients.all_kv_heads + kv_head) * gradients.num_part_tiles
            number += kv_tile - gradients.first_part_tile
            first = number.to(gl.int64) * KV_TILE + INDEX * KEYS
            store_part(gradients.dv_parts, dv, first, zero, HEAD_DIM_V)
            store_part(gradients.dk_parts, dk, first, zero, HEAD_DIM)


@gluon.jit
def send_alone(INDEX: gl.constexpr, gradients, dk_out, dv_out, memory, dk, dv, kv_head, first_key):
    """Store dk, dv of these keys in the type of the inputs. TMA takes them from shared memory in whole lines
    while the next task begins: stores out of registers, 8 rows by 16 bytes each, take longer than a step."""
    batch = kv_head // gradients.kv_heads
    at = [batch, kv_head - batch * gradients.kv_heads, first_key, 0]
    send_rows(dv_out, memory.dkv.index(INDEX), dv, at)
    send_rows(dk_out, memory.dkv.index(INDEX), dk * gradients.scale, at)


@gluon.jit
def send_rows(desc, room, tile, at):
    tma.store_wait(0)  # what was there has left
    source = reinterpret(room, [1, 1, KEYS, tile.shape[1]], desc.layout)
    reinterpret(room, [KEYS, tile.shape[1]], gl.NVMMASharedLayout(128, 16, rank=2)).store(tile.to(room.dtype))
    fence_async_shared()
    store_tile(desc, at, source)


@gluon.jit
def add_alone(
    gradients, dk_out, dv_out, dk, dv, kv_head, first_key, zero,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    if dk_out.dtype.element_ty != gl.float32:  # no accumulator: nothing finishes it later
        dk *= gradients.scale
    add_rows(gradients, dv_out, dv, kv_head, first_key, zero, HEAD_DIM_V, FIRST)
    add_rows(gradients, dk_out, dk, kv_head, first_key, zero, HEAD_DIM, FIRST)


@gluon.jit
def math_partition(
    INDEX: gl.constexpr, dk_out, dv_out, gradients, worker_start, tasks, steps, rows, scale, memory,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, Q_HALVES: gl.constexpr, MASK: gl.constexpr,
    FIRST: gl.constexpr, GROUPED: gl.constexpr, PARTS: gl.constexpr, DKV_BY_TMA: gl.constexpr,
):  # fmt: skip
    """GROUPED: dk, dv may stay in registers from task to task; otherwise every task has LOAD and STORE."""
    STAGES: gl.constexpr = memory.q.shape[0]
    Q_TILE: gl.constexpr = memory.q.shape[1]
    D_TILE: gl.constexpr = memory.q.shape[2]
    DV_TILE: gl.constexpr = memory.do.shape[2]
    KV_TILE: gl.constexpr = memory.k.shape[0]
    DQ_SHARED: gl.constexpr = dq_shared_layout(segment_of(HEAD_DIM))
    TWO_BUFFERS: gl.constexpr = memory.dq.shape[0] == 4
    V_IN_REGISTERS: gl.constexpr = Q_HALVES == 2
    exp2_scale = scale * LOG2E
    worker = gl.program_id(0)
    step = 0
    tile_number = 0
    dk = gl.zeros((KEYS, D_TILE), gl.float32, accumulator_layout(D_TILE))
    dv = gl.zeros((KEYS, DV_TILE), gl.float32, accumulator_layout(DV_TILE))
    v = memory.v.slice(INDEX * KEYS, KEYS, 0)
    if V_IN_REGISTERS:
        v = gl.zeros((KEYS, DV_TILE), memory.v.dtype, gl.DotOperandLayout(0, accumulator_layout(64), 2))
    for task in range(gl.load(worker_start + worker), gl.load(worker_start + worker + 1)):
        first_step = gl.load(tasks + task * 8 + 3)
        num_steps = gl.load(tasks + task * 8 + 4)
        if not GROUPED or gl.load(tasks + task * 8 + 5) & LOAD:
            mbarrier.wait(memory.kv_full, tile_number & 1)
            dk = gl.zeros((KEYS, D_TILE), gl.float32, accumulator_layout(D_TILE))
            dv = gl.zeros((KEYS, DV_TILE), gl.float32, accumulator_layout(DV_TILE))
            if V_IN_REGISTERS:
                v = memory.v.slice(INDEX * KEYS, KEYS, 0).load(v.type.layout)
        first_key = 0
        bounds = Bounds(num_steps, num_steps, num_steps, num_steps)  # anything: not used
        entry = 0
        if MASK != FULL:
            first_key = gl.load(tasks + task * 8 + 2) * KV_TILE + INDEX * KEYS
            bounds = bounds_of_keys(rows, first_key, KEYS, gl.SliceLayout(1, accumulator_layout(64)), MASK)
            if Q_HALVES == 2:
                entry = gl.load(steps + first_step)
        for t in range(num_steps):
            stage = step & (STAGES - 1)  # with % ptxas spills more
            parity = (step >> 1) & 1
            first_row = 0
            if MASK != FULL:  # only the mask needs to know where the tiles lie
                if Q_HALVES == 2:  # needed before the first product: read a step ahead, the table is padded
                    first_row = (entry & 0xFFFF) * Q_TILE
                    entry = gl.load(steps + first_step + t + 1)
                else:
                    first_row = (gl.load(steps + first_step + t) & 0xFFFF) * Q_TILE
            mbarrier.wait(memory.q_full.index(stage), parity)
            if Q_HALVES == 1:
                dq, dv, dk = step_whole(
                    INDEX, memory, stage, parity, dk, dv, first_row, first_key, rows, bounds,
                    exp2_scale, MASK,
                )  # fmt: skip
            else:
                dq, dv, dk = step_halves(
                    INDEX, memory, v, stage, parity, dk, dv, first_row, first_key, rows, bounds,
                    exp2_scale, MASK,
                )  # fmt: skip
                mbarrier.arrive(memory.q_empty.index(stage), count=1)
            mbarrier.wait(memory.dq_empty.index(stage), parity)
            dq_half = INDEX
            if TWO_BUFFERS:
                dq_half += 2 * stage
            reinterpret(memory.dq.index(dq_half), [64, 64], DQ_SHARED).store(dq)
            fence_async_shared()
            mbarrier.arrive(memory.dq_full.index(stage), count=1)
            if Q_HALVES == 1:
                dk = warpgroup_mma_wait(0, deps=[dk])
                mbarrier.arrive(memory.q_empty.index(stage), count=1)
            step += 1
        if not GROUPED or gl.load(tasks + task * 8 + 5) & STORE:
            mbarrier.arrive(memory.kv_empty, count=1)
            tile_number += 1
            add_dkv(
                INDEX, gradients, dk_out, dv_out, memory, dk, dv, tasks + task * 8, KV_TILE,
                HEAD_DIM, HEAD_DIM_V, FIRST, PARTS, DKV_BY_TMA,
            )  # fmt: skip
    if DKV_BY_TMA:
        tma.store_wait(0)
