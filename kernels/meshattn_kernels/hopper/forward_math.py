# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM102, SIM113, SIM114 - conditions on constants stand alone; no enumerate here
"""Consumers of the forward: softmax and both products of 64 query rows (see forward.py).

The online softmax is that of FlashAttention-2 (arXiv 2307.08691). The accumulator of earlier blocks joins at
the end of a task: a row with normalised out and log-sum-exp lse is a row with maximum lse, sum 1 and weighted
sum out."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from meshattn_kernels.hopper.masks import FULL, bounds_of_rows, row_ends, row_starts, seen_keys
from meshattn_kernels.hopper.output import ROWS, lse_addresses, out_addresses, store_part
from meshattn_kernels.hopper.shim import LN2, LOG2E, reinterpret, store_tile

MAX_START = gl.constexpr(-1e30)
"""Finite, so that exp2(old maximum - new maximum) is never inf - inf."""
LANES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
)
"""Of [64, 4]: a value for each of the four lanes that share a row of a product."""
LANES_ROW = gl.constexpr(gl.SliceLayout(1, LANES.value))
HEADROOM = gl.constexpr(8.0)
"""With LAZY_MAX the maximum that a row is computed with follows its scores only where they exceed it by more
than this (base 2): P stays below 256, and after a few tiles hardly a step has to rescale the sums."""
RESCALE = gl.constexpr("""{ .reg .pred one, other;
setp.neu.f32 one, $8, 1.0; @one mul.f32 $0, $0, $8; @one mul.f32 $1, $1, $8;
setp.neu.f32 other, $10, 1.0; @other mul.f32 $2, $2, $10; @other mul.f32 $3, $3, $10; }""")
"""Four sums of a thread, two of a row and two of another, times the factors of the rows. Instructions whose
predicate is false in a whole warp take hardly any power, which is what limits the clock."""
TASK_FIELDS = gl.constexpr(8)
"""int32 values of a task: batch, query head, key/value head, query block, first tile, number of tiles, 0 or
the number of its part from 1 on, 0."""


@gluon.jit
def wait_for_keys(memory, step):
    STAGES: gl.constexpr = memory.k.shape[0]
    mbarrier.wait(memory.k_full.index(step % STAGES), (step // STAGES) & 1)


@gluon.jit
def release_keys(memory, step, TOGETHER: gl.constexpr):
    """K of this step has been read. TOGETHER: K and V of a step come and go with one pair of barriers, those
    of K: fewer waits, but K is loaded later."""
    if not TOGETHER:
        mbarrier.arrive(memory.k_empty.index(step % memory.k.shape[0]), count=1)


@gluon.jit
def release_values(memory, step, TOGETHER: gl.constexpr):
    """V of this step has been read."""
    if TOGETHER:
        mbarrier.arrive(memory.k_empty.index(step % memory.k.shape[0]), count=1)
    else:
        mbarrier.arrive(memory.v_empty.index(step % memory.k.shape[0]), count=1)


@gluon.jit
def pass_over(memory, step, count, TOGETHER: gl.constexpr):
    """Release the keys and values of some steps unread. Only when they are there: a stage must not be
    released for the second time before the others have released it for the first."""
    STAGES: gl.constexpr = memory.k.shape[0]
    for _i in range(count):
        wait_for_keys(memory, step)
        release_keys(memory, step, TOGETHER)
        if not TOGETHER:
            mbarrier.wait(memory.v_full.index(step % STAGES), (step // STAGES) & 1)
        release_values(memory, step, TOGETHER)
        step += 1
    return step


@gluon.jit
def issue_scores(q, memory, step):
    """Wait for K of this step; asynchronous Q K^T  ->  fp32 [64, KV_TILE]."""
    STAGES: gl.constexpr = memory.k.shape[0]
    KV_TILE: gl.constexpr = memory.k.shape[1]
    wait_for_keys(memory, step)
    stage = step % STAGES
    zeros = gl.zeros(
        (ROWS, KV_TILE), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    )
    return warpgroup_mma(q, memory.k.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def issue_output(probs, out, memory, step, TOGETHER: gl.constexpr):
    """Wait for V of this step; asynchronous out + P V  ->  fp32 [64, DV_TILE]."""
    STAGES: gl.constexpr = memory.v.shape[0]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, out.type.layout, 2)
    stage = step % STAGES
    operand = gl.convert_layout(probs.to(memory.v.dtype), OPERAND)  # no data movement: same registers
    if not TOGETHER:
        mbarrier.wait(memory.v_full.index(stage), (step // STAGES) & 1)
    return warpgroup_mma(operand, memory.v.index(stage), out, is_async=True)


@gluon.jit
def rescaled(out, factor, LAZY_MAX: gl.constexpr):
    """out fp32 [64, DV_TILE] * factor fp32 [64]; with LAZY_MAX nearly all factors are 1."""
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, out.type.layout)), 1)
    if LAZY_MAX:
        factors = factor.broadcast_to(out.shape)
        out = gl.inline_asm_elementwise(
            RESCALE, "=f,=f,=f,=f,0,1,2,3,f,f,f,f", [out, factors], dtype=gl.float32, is_pure=True, pack=4
        )
    else:
        out = out * factor
    return out


@gluon.jit
def by_lane(tile):
    """A product [64, columns] as [64, 4, columns / 32, 4 lanes, 2]. A reduction over dims 4, 1 and 1 again is
    a tree inside each thread: 32 operations that wait for each other are long with one warp a scheduler."""
    COLUMNS: gl.constexpr = tile.shape[1]
    return gl.reshape(tile, (ROWS, 4, COLUMNS // 32, 4, 2))


@gluon.jit
def online_softmax(
    scores, row_max, row_sum, first_row, first_key, rows, bounds, exp2_scale,
    MASK: gl.constexpr, LAZY_MAX: gl.constexpr,
):  # fmt: skip
    """scores fp32 [64, KV_TILE] -> P, new row maximum (fp32 [64], base 2), sums (fp32 [64, 4], by lane: they
    meet at the end of a task), factor for the old sums."""
    KV_TILE: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = scores.type.layout
    if MASK != FULL:
        # A branch in ONE loop: separate loops for masked and unmasked tiles spill and are slower.
        if (first_key < bounds.common_start) | (first_key + KV_TILE > bounds.common_end):
            row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
            key = first_key + gl.arange(0, KV_TILE, layout=gl.SliceLayout(0, LAYOUT))
            visible = key[None, :] >= row_starts(rows, bounds, row, MASK)[:, None]
            visible = visible & (key[None, :] < row_ends(rows, bounds, row, MASK)[:, None])
            # Not a finite value: a row whose tile is all masked would give exp2 of a rounding error of 1e22.
            scores = gl.where(visible, scores, float("-inf"))
    tile_max = gl.max(gl.max(gl.max(gl.max(by_lane(scores), 4), 1), 1), 1)
    tile_max = gl.convert_layout(tile_max, gl.SliceLayout(1, LAYOUT)) * exp2_scale
    if LAZY_MAX:
        new_max = gl.where(tile_max > row_max + HEADROOM, tile_max, row_max)
    else:
        new_max = gl.maximum(row_max, tile_max)
    probs = gl.exp2(scores * exp2_scale - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    tile_sum = gl.convert_layout(gl.sum(gl.sum(gl.sum(by_lane(probs), 4), 1), 1), LANES)
    row_sum = row_sum * gl.convert_layout(rescale, LANES_ROW)[:, None] + tile_sum
    return probs, new_max, row_sum, rescale


@gluon.jit
def send_rows(out_desc, room, out, task_row, first_row):
    """The 64 rows of a task to memory by way of ``room``, from where TMA takes them in whole lines while the
    next task begins: stores out of registers, 8 rows by 16 bytes each, take longer than a tile of keys."""
    tma.store_wait(0)  # the rows of the last task have left
    room.store(out.to(room.dtype))
    fence_async_shared()
    store_tile(
        out_desc, [gl.load(task_row), gl.load(task_row + 1), first_row, 0],
        reinterpret(room, [1, 1, ROWS, out.shape[1]], out_desc.layout),
    )  # fmt: skip


@gluon.jit
def consumer(
    INDEX: gl.constexpr, output, out_desc, rows, worker_start, tasks, scale, memory,
    HEAD_DIM_V: gl.constexpr, CARRY_PROBS: gl.constexpr, TOGETHER: gl.constexpr, MASK: gl.constexpr,
    FIRST: gl.constexpr, PARTS: gl.constexpr, STAGED: gl.constexpr, OUT_BY_TMA: gl.constexpr,
):  # fmt: skip
    """64 query rows of each task. CARRY_PROBS: P is carried from step to step and P V of a step runs during
    the softmax of the next. Otherwise the scores are carried, Q K^T of the next step and P V of this one are
    issued together, and only the other consumers fill the tensor cores during the softmax.

    KEYS_EARLY: with CARRY_PROBS, the next keys are waited for between softmax and the wait for P V. ptxas
    moves that one up to the last branch before it, else in front of the softmax. Two consumers are slower so.
    """
    CONSUMERS: gl.constexpr = memory.q.shape[0]
    KV_TILE: gl.constexpr = memory.k.shape[1]
    DV_TILE: gl.constexpr = memory.v.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV_TILE, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    # Two consumers leave 240 registers to a thread; beside carried scores it is slower.
    Q_IN_REGISTERS: gl.constexpr = CONSUMERS == 2 and CARRY_PROBS
    KEYS_EARLY: gl.constexpr = CONSUMERS == 3
    LAZY_MAX: gl.constexpr = not Q_IN_REGISTERS  # 1 to 3 % faster, but 2 % slower there
    # Tiles that only other consumers of the block see: the first ones or the last, in the order of visits.
    # Where a block is no longer than a tile there are few, and it costs more than it saves.
    PASSES_OVER: gl.constexpr = MASK != FULL and CONSUMERS * ROWS > KV_TILE
    # While the last product runs, if no mask of columns takes the registers for that.
    EARLY: gl.constexpr = HEAD_DIM_V == DV_TILE and not OUT_BY_TMA
    exp2_scale = scale * LOG2E
    worker = gl.program_id(0)
    step = 0
    task_number = 0
    for task in range(gl.load(worker_start + worker), gl.load(worker_start + worker + 1)):
        task_row = tasks + task * TASK_FIELDS
        first_row = (gl.load(task_row + 3) * CONSUMERS + INDEX) * ROWS
        first_tile = gl.load(task_row + 4)
        num_tiles = gl.load(task_row + 5)
        bounds = bounds_of_rows(rows, first_row, ROWS, S_ROW, MASK)
        hidden_last = 0
        if PASSES_OVER:
            seen_start, seen_end = seen_keys(rows, first_row, ROWS, MASK)
            seen_tiles = (gl.maximum(seen_end, 0) + (KV_TILE - 1)) // KV_TILE - first_tile
            hidden_first = gl.minimum(gl.maximum(num_tiles - seen_tiles, 0), num_tiles - 1)
            step = pass_over(memory, step, hidden_first, TOGETHER)
            num_tiles -= hidden_first
            hidden_last = gl.maximum(seen_start, 0) // KV_TILE - first_tile
            hidden_last = gl.minimum(gl.maximum(hidden_last, 0), num_tiles - 1)
            num_tiles -= hidden_last
        key = (first_tile + hidden_last + num_tiles - 1) * KV_TILE
        mbarrier.wait(memory.q_full.index(INDEX), task_number & 1)
        q = memory.q.index(INDEX)
        if Q_IN_REGISTERS:
            q = q.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
            fence_async_shared()  # TMA writes the next q there
            mbarrier.arrive(memory.q_empty.index(INDEX), count=1)
        scores = issue_scores(q, memory, step)
        out = gl.zeros((ROWS, DV_TILE), gl.float32, O_LAYOUT)
        row_max = gl.full((ROWS,), MAX_START, gl.float32, S_ROW)
        row_sum = gl.full((ROWS, 4), 0.0, gl.float32, LANES)
        scores = warpgroup_mma_wait(0, deps=[scores])
        release_keys(memory, step, TOGETHER)
        if CARRY_PROBS:
            probs, row_max, row_sum, rescale = online_softmax(
                scores, row_max, row_sum, first_row, key, rows, bounds, exp2_scale, MASK, LAZY_MAX,
            )  # fmt: skip
            probs = probs.to(memory.v.dtype)
            for i in range(1, num_tiles):
                key -= KV_TILE
                scores = issue_scores(q, memory, step + 1)
                out = issue_output(probs, out, memory, step, TOGETHER)
                scores = warpgroup_mma_wait(1, deps=[scores])
                release_keys(memory, step + 1, TOGETHER)
                next_probs, row_max, row_sum, rescale = online_softmax(
                    scores, row_max, row_sum, first_row, key, rows, bounds, exp2_scale, MASK, LAZY_MAX,
                )  # fmt: skip
                if KEYS_EARLY:
                    if i + 1 < num_tiles:
                        wait_for_keys(memory, step + 2)
                out = warpgroup_mma_wait(0, deps=[out])
                release_values(memory, step, TOGETHER)
                out = rescaled(out, rescale, LAZY_MAX)
                probs = next_probs.to(memory.v.dtype)
                step += 1
        else:
            for _i in range(0, num_tiles - 1):
                probs, row_max, row_sum, rescale = online_softmax(
                    scores, row_max, row_sum, first_row, key, rows, bounds, exp2_scale, MASK, LAZY_MAX,
                )  # fmt: skip
                key -= KV_TILE
                scores = issue_scores(q, memory, step + 1)
                out = rescaled(out, rescale, LAZY_MAX)
                out = issue_output(probs, out, memory, step, TOGETHER)
                scores = warpgroup_mma_wait(1, deps=[scores])
                release_keys(memory, step + 1, TOGETHER)
                out = warpgroup_mma_wait(0, deps=[out])
                release_values(memory, step, TOGETHER)
                step += 1
            probs, row_max, row_sum, rescale = online_softmax(
                scores, row_max, row_sum, first_row, key, rows, bounds, exp2_scale, MASK, LAZY_MAX,
            )  # fmt: skip
            out = rescaled(out, rescale, LAZY_MAX)
        if not Q_IN_REGISTERS:
            mbarrier.arrive(memory.q_empty.index(INDEX), count=1)
        out = issue_output(probs, out, memory, step, TOGETHER)
        # Padding rows saw what their q, read as zero, would see: they are written as empty, or not at all.
        written = output.rows if FIRST else rows.n_q
        if PARTS:
            part = gl.load(task_row + 6)
            if part > 0:  # stored beside the accumulator, none of whose rows it touches
                written = 0
        lse_at, lse_mask = lse_addresses(output, task_row, first_row, written, S_ROW)
        if not FIRST:
            old_max = gl.load(lse_at, mask=lse_mask, other=float("-inf")) * LOG2E
        if EARLY:
            out_at, out_mask = out_addresses(output, task_row, first_row, written, HEAD_DIM_V, O_LAYOUT)
            if not FIRST and not STAGED:
                old_out = gl.load(out_at, mask=out_mask, other=0.0)
        out = warpgroup_mma_wait(0, deps=[out])
        release_values(memory, step, TOGETHER)
        if STAGED:
            mbarrier.wait(memory.earlier_full.index(INDEX), task_number & 1)
            old_out = memory.earlier.index(INDEX).load(O_LAYOUT)
            fence_async_shared()  # TMA writes the next rows there
            mbarrier.arrive(memory.earlier_empty.index(INDEX), count=1)
        step += 1
        if PASSES_OVER:
            step = pass_over(memory, step, hidden_last, TOGETHER)
        task_number += 1
        if not EARLY and not OUT_BY_TMA:
            out_at, out_mask = out_addresses(output, task_row, first_row, written, HEAD_DIM_V, O_LAYOUT)
            if not FIRST and not STAGED:
                old_out = gl.load(out_at, mask=out_mask, other=0.0)
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), S_ROW)
        row_sum = gl.where(first_row + gl.arange(0, ROWS, layout=S_ROW) < rows.n_q, row_sum, 0.0)
        if not FIRST:
            new_max = gl.maximum(row_max, old_max)
            factor, old_factor = gl.exp2(row_max - new_max), gl.exp2(old_max - new_max)
            out = out * gl.convert_layout(factor, O_ROW)[:, None]
            out += old_out * gl.convert_layout(old_factor, O_ROW)[:, None]
            row_max, row_sum = new_max, row_sum * factor + old_factor
        # 0 where no key is seen; NaN, where some number was none, is not 0 and must show.
        weight = gl.where(row_sum != 0.0, 1.0 / row_sum, 0.0)
        lse = gl.where(row_sum != 0.0, (row_max + gl.log2(row_sum)) * LN2, float("-inf"))
        gl.store(lse_at, lse, mask=lse_mask)
        out = out * gl.convert_layout(weight, O_ROW)[:, None]
        if not OUT_BY_TMA:
            gl.store(out_at, out.to(output.out.dtype.element_ty), mask=out_mask)
        elif not PARTS:
            send_rows(out_desc, memory.out.index(INDEX), out, task_row, first_row)
        elif part == 0:
            send_rows(out_desc, memory.out.index(INDEX), out, task_row, first_row)
        if PARTS:
            if part > 0:
                store_part(output, part - 1, INDEX, CONSUMERS, out, lse, HEAD_DIM_V)
    if OUT_BY_TMA:
        tma.store_wait(0)
