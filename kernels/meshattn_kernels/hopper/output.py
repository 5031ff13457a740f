# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Where the forward's accumulators lie."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from meshattn_kernels.hopper.shim import aggregate

ROWS = gl.constexpr(64)
"""Query rows of a consumer: what one warpgroup instruction takes."""


@aggregate
class Output:
    """The accumulators and their sizes: out [B, C, H, D_v] and lse [B, H, C], contiguous. fp32; or out is the
    result itself, in the type of the inputs. And the parts, fp32 [parts, block, D_v] and [parts, block]."""

    out: gl.tensor
    lse: gl.tensor
    out_parts: gl.tensor
    lse_parts: gl.tensor
    rows: gl.tensor
    heads: gl.tensor

    @gluon.constexpr_function
    def __init__(self, out, lse, out_parts, lse_parts, rows, heads):
        self.out, self.lse, self.rows, self.heads = out, lse, rows, heads
        self.out_parts, self.lse_parts = out_parts, lse_parts


@gluon.jit
def out_addresses(output, task_row, first_row, num_rows, HEAD_DIM_V: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the 64 rows of a task lie in out, and which of them and of their columns are below num_rows and
    D_v.

    Batch and head are loaded here, at every use: registers that live through the loop are dearer.
    """
    DV_TILE: gl.constexpr = LAYOUT.instr_shape[1]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, DV_TILE, layout=gl.SliceLayout(0, LAYOUT))
    batch = gl.load(task_row).to(gl.int64)
    head = gl.load(task_row + 1)
    tile = output.out + ((batch * output.rows + first_row) * output.heads + head) * HEAD_DIM_V
    offset = (row * (output.heads * HEAD_DIM_V))[:, None] + column[None, :]
    return tile + offset, (first_row + row < num_rows)[:, None] & (column < HEAD_DIM_V)[None, :]


@gluon.jit
def lse_addresses(output, task_row, first_row, num_rows, LAYOUT: gl.constexpr):
    """Where the 64 rows of a task lie in lse, and which of them are below num_rows."""
    row = first_row + gl.arange(0, ROWS, layout=LAYOUT)
    head = gl.load(task_row) * output.heads + gl.load(task_row + 1)
    return output.lse + head.to(gl.int64) * output.rows + row, row < num_rows


@gluon.jit
def store_part(
    output, part, INDEX: gl.constexpr, CONSUMERS: gl.constexpr, out, lse, HEAD_DIM_V: gl.constexpr
):
    """Store the 64 rows of a consumer, out and lse, as those of a part."""
    LAYOUT: gl.constexpr = out.type.layout
    first = (part * CONSUMERS + INDEX) * ROWS
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = output.out_parts + first.to(gl.int64) * HEAD_DIM_V + (row * HEAD_DIM_V)[:, None] + column[None, :]
    gl.store(at, out, mask=(column < HEAD_DIM_V)[None, :].broadcast_to(out.shape))
    gl.store(output.lse_parts + first + gl.arange(0, ROWS, layout=lse.type.layout), lse)
