"""Inputs and expected results, made the same way in all tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshattn import reference


@dataclass(frozen=True)
class Shape:
    """Sizes of a call; printed, it is the id of a test case. ``D_v`` and ``S_k`` are D and S by default."""

    B: int
    S: int
    H: int
    H_kv: int
    D: int
    D_v: int | None = None
    S_k: int | None = None

    @property
    def head_dim_v(self) -> int:
        return self.D if self.D_v is None else self.D_v

    @property
    def seq_len_k(self) -> int:
        return self.S if self.S_k is None else self.S_k

    def __str__(self) -> str:
        return "-".join(f"{name}{size}" for name, size in vars(self).items() if size is not None)


class Inputs(NamedTuple):
    """q [B, S, H, D], k [B, S_k, H_kv, D], v [B, S_k, H_kv, D_v], do [B, S, H, D_v]."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


class Results(NamedTuple):
    """out [B, S, H, D_v], lse [B, H, S], and the gradients in the shapes of q, k and v."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def make_inputs(shape: Shape, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """Normal random inputs, made in ``dtype``: the oracle sees the same numbers, promoted."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    return Inputs(
        q=normal(shape.B, shape.S, shape.H, shape.D),
        k=normal(shape.B, shape.seq_len_k, shape.H_kv, shape.D),
        v=normal(shape.B, shape.seq_len_k, shape.H_kv, shape.head_dim_v),
        do=normal(shape.B, shape.S, shape.H, shape.head_dim_v),
    )


def dense(inputs: Inputs, dtype: torch.dtype | None = None, **rule: Any) -> Results:
    """All results of dense attention on the inputs, computed in ``dtype`` (by default their own).

    ``dense(inputs, torch.float64, ...)`` is the oracle, ``dense(inputs, ...)`` eager attention in the same
    type. ``rule`` are the keyword arguments of ``meshattn.reference.attention``.
    """
    q, k, v, do = (x.detach().to(dtype or x.dtype) for x in inputs)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = reference.attention(q, k, v, **rule)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
    return Results(out.detach(), lse.detach(), dq, dk, dv)
