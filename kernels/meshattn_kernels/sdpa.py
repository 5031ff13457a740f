"""The attention operators of PyTorch as kernels, to compare with: flash attention (FlashAttention-2 on a GPU,
its counterpart on the CPU) and that of cuDNN. On a GPU their backward adds to dq in any order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshattn_kernels.delta import row_delta
from meshattn_kernels.plain_blocks import PlainBlocks

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class SdpaKernel(PlainBlocks):
    """Flash attention, called by its operators, for lse. See ``PlainBlocks`` for the methods."""

    name: ClassVar[str] = "sdpa"
    deterministic: ClassVar[bool] = False

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        attention = (
            _aten._scaled_dot_product_flash_attention
            if q.is_cuda
            else _aten._scaled_dot_product_flash_attention_for_cpu
        )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = attention(q, k, v, 0.0, causal, scale=softmax_scale)[:2]
        return out.transpose(1, 2), lse

    def gradients(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        lse: Tensor,
        delta: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = _any_out(do, delta)
        do, q, k, v, out = (x.transpose(1, 2) for x in (do, q, k, v, out))
        lse = lse.contiguous()
        if q.is_cuda:
            seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a dropout that is off
            grads = _aten._scaled_dot_product_flash_attention_backward(
                do, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed,
                scale=softmax_scale,
            )  # fmt: skip
        else:
            grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                do, q, k, v, out, lse, 0.0, causal, scale=softmax_scale
            )
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


@dataclass(frozen=True)
class CudnnKernel(PlainBlocks):
    """The attention of cuDNN. See ``PlainBlocks`` for the methods."""

    name: ClassVar[str] = "cudnn"
    deterministic: ClassVar[bool] = False

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=softmax_scale
        )[:2]
        return out.transpose(1, 2), lse.squeeze(-1)

    def gradients(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        lse: Tensor,
        delta: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = _any_out(do, delta)
        do, q, k, v, out = (x.transpose(1, 2) for x in (do, q, k, v, out))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that is off
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, seed, None, None, None,
            q.shape[2], k.shape[2], 0.0, causal, scale=softmax_scale,
        )  # fmt: skip
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


def _any_out(do: Tensor, delta: Tensor) -> Tensor:
    """A tensor like do whose products with do sum to delta: the operators take out, and make delta of it.

    It is the projection of out on do, and so nowhere greater than out.
    """
    square = row_delta(do, do)
    share = torch.where(square > 0, delta / square, 0.0)
    return (do * share.transpose(1, 2).unsqueeze(-1)).to(do.dtype)
