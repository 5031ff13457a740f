"""The autograd edge: what a call keeps for its backward pass, and which gradients it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from meshattn import engine
from meshattn.mesh import AttentionMesh
from meshattn.transport.base import TransportError
from meshattn_kernels.rules import WITHOUT_LSE_GRADIENT


def differentiable_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: AttentionMesh, call: engine.Call, seed: int
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows, as `engine.forward`, differentiable once in the four tensors."""
    result: tuple[Tensor, Tensor] = _Attention.apply(q, k, v, sinks, mesh, call, seed)  # type: ignore[no-untyped-call]
    return result


@contextmanager
def _engine_room(mesh: AttentionMesh, call: engine.Call) -> Iterator[None]:
    """Autocast is off, because the engine chooses its types itself; a failed transfer is explained."""
    with torch.autocast(call.device.type, enabled=False):
        try:
            yield
        except TransportError as error:
            raise mesh.explain(error) from error


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mesh: AttentionMesh,
        call: engine.Call,
        seed: int,
    ) -> tuple[Tensor, Tensor]:
        with _engine_room(mesh, call):
            out, lse = engine.forward(call, q, k, v, sinks, seed)
        ctx.save_for_backward(q, k, v, out, lse, sinks)  # type: ignore[arg-type]  # None is allowed
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.call, ctx.seed = mesh, call, seed  # type: ignore[attr-defined]
        ctx.number = mesh.agreement.calls  # type: ignore[attr-defined]
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        # Ranks that came to their backward passes in another order would add up each other's gradients.
        before = ctx.mesh.agreement.calls - ctx.number
        error = _refused_gradient(ctx.call.kernel.name, dlse)
        ctx.mesh.agreement.enter("backward", {"of": f"the call {before} calls before it"}, error)
        if do is None:  # only lse is used
            do = torch.zeros_like(out)
        with torch.no_grad(), _engine_room(ctx.mesh, ctx.call):
            grads = engine.backward(ctx.call, q, k, v, out, lse, do, dlse, sinks, ctx.seed)
        if torch.is_grad_enabled():  # create_graph=True: somebody may differentiate the gradients
            sources = [x for x in (q, k, v, sinks, do, dlse) if x is not None]
            some = [x for x in grads if x is not None]
            some = _Undifferentiable.apply(len(some), *some, *sources)  # type: ignore[no-untyped-call]
            grads = *some, *grads[len(some) :]
        return *grads, None, None, None


def _refused_gradient(kernel: str, dlse: Tensor | None) -> Exception | None:
    if dlse is None or kernel not in WITHOUT_LSE_GRADIENT:
        return None
    return NotImplementedError(
        f"a gradient flows through lse, which kernel {kernel!r} cannot take: detach lse, or choose another "
        "kernel"
    )


class _Undifferentiable(torch.autograd.Function):
    """Ties gradients to what they depend on, so that differentiating them raises.

    PyTorch's own ``once_differentiable`` ties them to ``do`` alone: where that is a constant, a penalty on a
    gradient would silently count as a constant too.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, gradients: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:gradients])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError("the gradients of attention cannot be differentiated again")
