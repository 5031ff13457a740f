# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Turns: sums of several programs into one tile of memory, in an order that a table fixes.

A counter a tile holds the turn that is due. A program waits for its turn, adds, and passes the turn on.
Acquire and release at the scope of the GPU make everything added before visible to the next; each of the two
is followed or led by a barrier of the thread block, because one thread speaks for all. Both are inline
assembly: a loop or a barrier written in Triton inside a pipelined loop switches pipelining off, and an
atomic release written in Triton has no barrier before it.

The interpreter runs programs one after the other, so a turn that has not come when it is asked for never
comes: the sum is made NaN there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshattn_kernels.portable.tiles import INTERPRETED


@triton.jit
def wait_for_turn(counter_ptr, turn):
    """Wait until the counter holds ``turn``. Traps after 20 million reads, some ten seconds: better an error
    than a GPU that hangs."""
    tl.inline_asm_elementwise(
        """{ .reg .pred other, again, stuck; .reg .b32 thread, seen, reads;
mov.b32 reads, 0; mov.u32 thread, %tid.x; setp.ne.b32 other, thread, 0;
@other bra DONE;
SPIN: ld.acquire.gpu.global.b32 seen, [$1];
add.s32 reads, reads, 1; setp.ne.b32 again, seen, $2; setp.gt.s32 stuck, reads, 20000000;
@stuck trap;
@again bra SPIN;
DONE: bar.warp.sync 0xffffffff; bar.sync 0;
mov.b32 $0, reads; }""",
        "=r,l,r",
        [counter_ptr, turn],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def pass_turn(counter_ptr, next_turn):
    """Publish all that this thread block has written, and let the next one in."""
    tl.inline_asm_elementwise(
        """{ .reg .pred first; .reg .b32 thread;
bar.sync 0;
mov.u32 thread, %tid.x; setp.eq.b32 first, thread, 0;
@first st.release.gpu.global.b32 [$1], $2;
mov.b32 $0, thread; }""",
        "=r,l,r",
        [counter_ptr, next_turn],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def begin_turn(counter_ptr, turn, value):
    """``value``, once it is its turn to be added."""
    if INTERPRETED:
        value = tl.where(tl.load(counter_ptr) == turn, value, float("nan"))
    else:
        wait_for_turn(counter_ptr, turn)
    return value


@triton.jit
def end_turn(counter_ptr, turn):
    if INTERPRETED:
        tl.store(counter_ptr, turn + 1)
    else:
        pass_turn(counter_ptr, turn + 1)
