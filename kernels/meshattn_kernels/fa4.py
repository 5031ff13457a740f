"""FlashAttention-4 (the package flash-attn-4, where it is installed) as a kernel, to compare with."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshattn_kernels.plain_blocks import PlainBlocks

_one_at_a_time = threading.Lock()  # its compiler keeps global state, which two threads spoil


@dataclass(frozen=True)
class Fa4Kernel(PlainBlocks):
    """See ``PlainBlocks`` for the methods. Its backward waits for turns, as ours do.

    deterministic       False lets it add to dq in any order, as a control for measurements.
    """

    deterministic: bool = True

    name: ClassVar[str] = "fa4"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        with _one_at_a_time, torch.cuda.device(q.device):
            out, lse, *_ = _interface()._flash_attn_fwd(
                q, k, v, softmax_scale=softmax_scale, causal=causal, return_lse=True
            )
        return out, lse

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
        # It forms rowsum(do * out) - dlse, dlse being the gradient of lse: with out 0 that is delta.
        out = torch.zeros_like(do, memory_format=torch.contiguous_format)
        with _one_at_a_time, torch.cuda.device(q.device):
            dq, dk, dv, *_ = _interface()._flash_attn_bwd(
                q, k, v, out, do, lse.contiguous(), softmax_scale=softmax_scale, causal=causal,
                deterministic=self.deterministic, dlse=-delta,
            )  # fmt: skip
        return dq, dk, dv


def _interface() -> Any:
    from flash_attn.cute import interface

    return interface
