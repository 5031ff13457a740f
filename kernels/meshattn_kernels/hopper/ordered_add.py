# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Ordered accumulation: the part of the backward that makes it deterministic.

Every tile of dq receives one contribution from each tile of keys that it sees, computed by different thread
blocks. They are added to fp32 memory by TMA in a fixed order: counter[head, query tile] holds the turn that
is due. Two warps of each block do nothing else, so a wait never stops the tensor cores until a buffer
is needed again.

An addition is published by release only after it has landed in memory, which ``store_wait`` does not say: it
waits until shared memory has been read (``wait_group.read``). Hence the ``wait_group 0`` here."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from meshattn_kernels.hopper.shim import reinterpret, store_tile, tma_reduce_add

# A wait can only fail to end if not all blocks are resident or a table is wrong. After some ten seconds of
# reads the mailbox (failure.py) says how many there may be.
_SPIN = """{ .reg .pred again, stuck; .reg .b32 seen, reads, worker; mov.b32 reads, 0;
SPIN: ld.acquire.gpu.global.b32 seen, [$1];
add.s32 reads, reads, 1; setp.lt.s32 again, seen, $2; setp.gt.s32 stuck, reads, 10000000;
@stuck bra LATE;
@again bra SPIN;
bra DONE;
LATE: ld.volatile.global.b32 worker, [$3+16]; setp.gt.s32 stuck, reads, worker;
@stuck bra STUCK;
@again bra SPIN;
bra DONE;
STUCK: mov.u32 worker, %ctaid.x;
st.volatile.global.b32 [$3+4], worker; st.volatile.global.b32 [$3+8], $2;
st.volatile.global.b32 [$3+12], seen;
fence.acq_rel.sys; st.volatile.global.b32 [$3], 1; fence.acq_rel.sys; trap;
DONE: fence.proxy.async.global;
mov.b32 $0, seen; }"""
_FINISH = """{ .reg .pred first; .reg .b32 lane;
cp.async.bulk.wait_group 0;
bar.warp.sync 0xffffffff;
mov.u32 lane, %laneid; setp.eq.b32 first, lane, 0;
@first fence.proxy.async.global;
@first st.release.gpu.global.b32 [$1], $2;
mov.b32 $0, lane; }"""
SPIN = gl.constexpr(_SPIN)
FINISH = gl.constexpr(_FINISH)


@gluon.jit
def wait_for_turn(counter, turn, mailbox):
    """Every thread spins with acquire until *counter >= turn; what it then does, by TMA too, comes after.

    If a wait is in vain, write to ``mailbox`` (failure.py) and trap rather than hang for ever.
    """
    return gl.inline_asm_elementwise(
        SPIN, "=r,l,r,l", [counter, turn, mailbox], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def finish_turn(counter, next_turn):
    """One warp: wait until its bulk stores are in memory, then publish with release."""
    return gl.inline_asm_elementwise(
        FINISH, "=r,l,r", [counter, next_turn], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def segment_of(head_dim):
    """fp32 values of a row of dq that TMA swizzles as one line: 128 bytes, or 64 where the head size asks
    for it."""
    return 32 if head_dim % 32 == 0 else 16


@gluon.constexpr_function
def column_order(segment):
    """Which bit of a column is bit 0, 1, ... of its place in a row of dq; higher bits keep their place. Never
    mixes columns of two segments."""
    return [0, 3, 1, 4, 2, 5] if segment == 32 else [0, 3, 1, 2, 4, 5]


@gluon.constexpr_function
def dq_shared_layout(segment):
    """How half a tile of dq, 64 rows by 64 columns, lies in shared memory: each thread stores whole 16-byte
    vectors, without bank conflicts.

    Entry i is the (row, column) that bit i of the offset stands for. Columns are permuted inside a row, so
    that two pairs that one thread holds (columns c and c + 8) meet; then come rows. On its way out TMA swaps
    16-byte units inside a line by XOR of offset bits 2, 3, .. with bits 5, 6, ..; the same XOR here makes
    global memory plain. With segments of 32 the lanes that store together (two rows, four vectors each) hit
    all banks."""
    plain = [[0, 1 << bit] for bit in column_order(segment)] + [[1 << bit, 0] for bit in range(6)]
    for bit in (5, 6, 7) if segment == 32 else (5, 6):
        plain[bit] = [plain[bit][0] ^ plain[bit - 3][0], plain[bit][1] ^ plain[bit - 3][1]]
    return gl.SharedLinearLayout(plain, [], 1024)


@gluon.jit
def half_of_tile(dq_desc, memory, q_tile, BUFFER: gl.constexpr, INDEX: gl.constexpr):
    """Memory of half a tile of dq in a buffer, and where it begins: rows and segments."""
    Q_TILE: gl.constexpr = memory.q.shape[1]
    SEGMENT: gl.constexpr = dq_desc.block_shape[3]
    SEGMENTS: gl.constexpr = dq_desc.block_shape[2]
    source = reinterpret(memory.dq.index(2 * BUFFER + INDEX), [1, 64, SEGMENTS, SEGMENT], dq_desc.layout)
    row = q_tile * Q_TILE
    segment = 0
    if Q_TILE == 64:
        segment = INDEX * SEGMENTS
    else:
        row += INDEX * 64
    return source, row, segment


@gluon.jit
def writer_partition(
    NUMBER: gl.constexpr, dq_desc, counters, mailbox, worker_start, tasks, steps, num_q_tiles, memory,
    FIRST: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """One warp of two, for steps of even or of odd number: adds a tile of dq to global memory when its turn
    has come. From the look at the counter to the release takes about as long as a step, so one begins while
    the other still waits for its addition to land. With two buffers each has its own, so that the math warps
    need not stop when a turn comes late; one buffer each frees for the other's next step."""
    TWO_BUFFERS: gl.constexpr = memory.dq.shape[0] == 4
    BUFFER: gl.constexpr = NUMBER if TWO_BUFFERS else 0
    NEXT: gl.constexpr = NUMBER if TWO_BUFFERS else 1 - NUMBER  # the steps that use the buffer next
    worker = gl.program_id(0)
    step = 0
    if TWO_BUFFERS or NUMBER == 1:  # free from the beginning
        mbarrier.arrive(memory.dq_empty.index(NEXT), count=1)
    for task in range(gl.load(worker_start + worker), gl.load(worker_start + worker + 1)):
        head = gl.load(tasks + task * 8)
        first_step = gl.load(tasks + task * 8 + 3)
        num_steps = gl.load(tasks + task * 8 + 4)
        entry = gl.load(steps + first_step)
        for t in range(num_steps):
            q_tile = entry & 0xFFFF
            turn = entry >> 16
            entry = gl.load(steps + first_step + t + 1)  # ahead of its use: the table is padded at its end
            if step & 1 == NUMBER:
                counter = counters + head * num_q_tiles + q_tile
                mbarrier.wait(memory.dq_full.index(NUMBER), (step >> 1) & 1)
                if ORDERED:
                    wait_for_turn(counter, turn, mailbox)
                for index in gl.static_range(2):
                    source, row, segment = half_of_tile(dq_desc, memory, q_tile, BUFFER, index)
                    if FIRST and ORDERED:
                        if turn == 0:  # the first turn overwrites: dq needs no zero fill
                            store_tile(dq_desc, [head, row, segment, 0], source)
                        else:
                            tma_reduce_add(dq_desc, [head, row, segment, 0], source)
                    else:
                        tma_reduce_add(dq_desc, [head, row, segment, 0], source)
                tma.store_wait(0)  # shared memory has been read: the buffer is free
                mbarrier.arrive(memory.dq_empty.index(NEXT), count=1)
                if ORDERED:
                    finish_turn(counter, turn + 1)
            step += 1
    tma.store_wait(0)
