"""A weight that all ranks hold alike, with its whole gradient on each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from meshattn.arguments import check_memory, words_of
from meshattn.mesh import AttentionMesh
from meshattn.packing import as_written
from meshattn.sequence import check_dense
from meshattn.transport.base import TransportError
from meshattn.trouble import Trouble
from meshattn_kernels.contract import accumulator_dtype


def replicated(weight: Tensor, mesh: AttentionMesh) -> Tensor:
    """The weight, whose gradient becomes the sum of what the rows of all ranks give, in the backward pass.

    For attention sinks and other weights whose gradients nothing else adds up over the ranks of the mesh. Do
    not use it where something does (DDP, FSDP, an all_reduce of yours): every row would count P times.

    The backward pass is collective. The parts are added in the order of the ranks, in the accumulator type,
    so that all ranks get the same bits on every run.

    Args:
        weight: a float tensor, the same on every rank.

    Raises:
        ValueError: not a dense float tensor, or the mesh is closed; in the backward pass, as
            `mesh_attention` does.
    """
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        kind = str(weight.dtype) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"weight is {kind}: it must be a float tensor, which has a gradient")
    check_dense("weight", weight)
    if not isinstance(mesh, AttentionMesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}: pass what init_attention_mesh() returns")
    mesh.require_open()
    result: Tensor = _Replicated.apply(weight, mesh)  # type: ignore[no-untyped-call]
    return result


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, mesh: AttentionMesh) -> Tensor:
        ctx.mesh = mesh  # type: ignore[attr-defined]
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        mesh: AttentionMesh = ctx.mesh
        mesh.require_open()
        name, trouble = "the gradient of a replicated weight", Trouble()
        with trouble:
            check_memory(name, gradient)
        with mesh.agreement.one_thread:
            mesh.agreement.enter(name, {"gradient": words_of(gradient)}, trouble)
            try:
                parts = mesh.connection.transport.all_gather(as_written(gradient).contiguous())
            except TransportError as failure:
                raise mesh.explain(failure) from failure
        total = torch.zeros_like(gradient, dtype=accumulator_dtype(gradient.dtype))
        for part in parts:
            total += part.to(total.dtype)
        return total.to(gradient.dtype), None
