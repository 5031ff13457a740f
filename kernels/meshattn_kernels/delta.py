"""delta, the one number a row that the backward pass needs of the forward's result."""

from __future__ import annotations

from einops import einsum
from torch import Tensor

from meshattn_kernels.contract import accumulator_dtype
from meshattn_kernels.rules import runs_triton


def row_delta(do: Tensor, out: Tensor, into: Tensor | None = None) -> Tensor:
    """sum over the head size of do * out: [B, C, H, D_v] each, any strides -> [B, H, C], in the accumulator
    type; ``into`` is contiguous memory for it."""
    assert do.shape == out.shape, f"do is {list(do.shape)} and out {list(out.shape)}"
    exact = accumulator_dtype(do.dtype)
    batch, rows, heads, _ = do.shape
    delta = do.new_empty((batch, heads, rows), dtype=exact) if into is None else into
    if runs_triton(do.device, exact):
        from meshattn_kernels.row_passes import launch_delta

        launch_delta(do, out, delta)
    else:
        delta.copy_(einsum(do.to(exact), out.to(exact), "b c h d, b c h d -> b h c"))
    return delta
