# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Memory-bound passes over the rows of [B, C, H, D] tensors on a GPU, in plain Triton: one read of each input
and no temporaries, where PyTorch operations would make copies in float32 and read them again.

A program takes ROWS rows of one head. Heads vary fastest over the programs: neighbours read neighbouring
memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshattn_kernels.bound import FUSED, Kept, Launch, bound
from meshattn_kernels.portable.launch import INTERPRETED, on_device

_TILE = 4096  # elements of a program's tile


@triton.jit
def _rows_of_program(rows, heads, ROWS: tl.constexpr):
    """Batch and head of this program as int64, its rows, and which of these exist."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(rows, ROWS)
    row = pid // heads % blocks * ROWS + tl.arange(0, ROWS)
    return (pid // heads // blocks).to(tl.int64), (pid % heads).to(tl.int64), row.to(tl.int64), row < rows


@triton.jit
def delta_kernel(
    do_ptr, out_ptr, delta_ptr, rows, heads, do_b, do_c, do_h, do_d, out_b, out_c, out_h, out_d,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta [B, H, C] contiguous = sum over the last dim of do * out, in float32; strides are those of do and
    out."""
    batch, head, row, real = _rows_of_program(rows, heads, ROWS)
    dim = tl.arange(0, PADDED)
    mask = real[:, None] & (dim < DIM)[None, :]
    do_ptr += batch * do_b + head * do_h
    out_ptr += batch * out_b + head * out_h
    do = tl.load(do_ptr + (row * do_c)[:, None] + (dim * do_d)[None, :], mask=mask, other=0.0)
    out = tl.load(out_ptr + (row * out_c)[:, None] + (dim * out_d)[None, :], mask=mask, other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + (batch * heads + head) * rows + row, delta, mask=real)


@triton.jit
def merge_kernel(
    out_ptr, lse_ptr, other_out_ptr, other_lse_ptr, rows, heads,
    out_b, out_c, out_h, out_d, lse_b, lse_h, lse_c,
    other_out_b, other_out_c, other_out_h, other_out_d, other_lse_b, other_lse_h, other_lse_c,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """See ``merge.merge_partial``; strides are those of out, lse, other_out and other_lse."""
    batch, head, row, real = _rows_of_program(rows, heads, ROWS)
    lse_ptr += batch * lse_b + head * lse_h
    other_lse_ptr += batch * other_lse_b + head * other_lse_h
    lse = tl.load(lse_ptr + row * lse_c, mask=real, other=0.0)
    other_lse = tl.load(other_lse_ptr + row * other_lse_c, mask=real, other=0.0).to(tl.float32)
    pivot = tl.maximum(lse, other_lse)
    # Rows empty on both sides: exp(-inf - 0) is 0 where exp(-inf + inf) is NaN.
    finite_pivot = tl.where(pivot == float("-inf"), 0.0, pivot)
    weight = tl.exp(lse - finite_pivot)
    other_weight = tl.exp(other_lse - finite_pivot)
    total = weight + other_weight
    # Several threads have read the lse of a row, and one of them writes it: first all must have read.
    tl.debug_barrier()
    tl.store(lse_ptr + row * lse_c, pivot + tl.log(total), mask=real)
    # The greater of the two weights is 1, so only rows empty on both sides have a total below 1.
    total = tl.maximum(total, 1.0)
    dim = tl.arange(0, PADDED)
    mask = real[:, None] & (dim < DIM)[None, :]
    out_ptrs = out_ptr + batch * out_b + head * out_h + (row * out_c)[:, None] + (dim * out_d)[None, :]
    other_out_ptr += batch * other_out_b + head * other_out_h
    other_ptrs = other_out_ptr + (row * other_out_c)[:, None] + (dim * other_out_d)[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0) * (weight / total)[:, None]
    other = tl.load(other_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, out + other * (other_weight / total)[:, None], mask=mask)


def launch_delta(do: Tensor, out: Tensor, delta: Tensor) -> None:
    _, rows, heads, _ = do.shape
    strides = *do.stride(), *out.stride()
    _launch(delta_kernel, do.shape, (do, out, delta), (rows, heads, *strides))


def launch_merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    _, rows, heads, _ = out.shape
    tensors = out, lse, other_out, other_lse
    strides = *out.stride(), *lse.stride(), *other_out.stride(), *other_lse.stride()
    _launch(merge_kernel, out.shape, tensors, (rows, heads, *strides))


_launches: Kept[Launch] = Kept()


def _launch(kernel: Any, shape: torch.Size, tensors: tuple[Tensor, ...], sizes: tuple[int, ...]) -> None:
    """A kernel on the rows of [B, C, H, D], with all that its code and its arguments depend on."""
    device = tensors[0].device
    with on_device(device):
        pointers, types = [x.data_ptr() for x in tensors], [x.dtype for x in tensors]
        key = (id(kernel), *pointers, *types, *shape, *sizes, device.index)
        launch = _launches.get(key)
        if launch is None:
            batch, rows, heads, dim = shape
            constants = _constants(dim)
            programs = batch * heads * -(-rows // constants["ROWS"])
            if programs == 0:
                return
            if INTERPRETED:
                kernel[(programs,)](*tensors, *sizes, **constants)
                return
            args = (*tensors, *sizes)
            compiled = kernel.warmup(*args, **constants, **FUSED, grid=(programs,))
            launch = _launches.put(
                key, bound(compiled, device.index, programs, args, tuple(constants.values()))
            )
        launch()


def _constants(dim: int) -> dict[str, int]:
    padded = 1 << max(dim - 1, 0).bit_length()
    return {"DIM": dim, "PADDED": padded, "ROWS": max(1, min(128, _TILE // padded))}
