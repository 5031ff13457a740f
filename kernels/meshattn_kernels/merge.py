"""The one merge of two attention results over disjoint sets of keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshattn_kernels.rules import runs_triton


def merge_partial(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge another partial result into (out, lse), in place.

    out and other_out are [B, C, H, D_v], each normalised over its own keys; lse and other_lse are [B, H, C],
    the natural log of the sum of exp(scores). out and lse have the accumulator type, which is computed in;
    the other two may have another float type. A row that has seen no key has lse -inf and out 0, on either
    side or on both:

        total = log(exp(lse) + exp(other_lse))
        out = out * exp(lse - total) + other_out * exp(other_lse - total)
        lse = total
    """
    assert out.shape == other_out.shape, f"out {list(out.shape)} and other_out {list(other_out.shape)} differ"
    assert lse.shape == other_lse.shape, f"lse {list(lse.shape)} and other_lse {list(other_lse.shape)} differ"
    if runs_triton(out.device, out.dtype):
        from meshattn_kernels.row_passes import launch_merge

        launch_merge(out, lse, other_out, other_lse)
        return
    pivot = torch.maximum(lse, other_lse)
    # Rows empty on both sides: exp(-inf - 0) is 0 where exp(-inf + inf) is NaN.
    finite_pivot = pivot.masked_fill(pivot == -math.inf, 0.0)
    weight, other_weight = (lse - finite_pivot).exp_(), (other_lse - finite_pivot).exp_()
    total = weight + other_weight
    lse.copy_(pivot + total.log())
    # The greater of the two weights is 1, so only rows empty on both sides have a total below 1.
    total.clamp_(min=1.0)
    out.mul_(_per_row(weight / total))
    out.addcmul_(other_out.to(out.dtype), _per_row(other_weight / total))


def _per_row(weight: Tensor) -> Tensor:
    """[B, H, C] -> [B, C, H, 1]."""
    return weight.transpose(1, 2).unsqueeze(-1)
