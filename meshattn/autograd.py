"""The autograd edge: what a call keeps for its backward pass, and which gradients it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from meshattn import heads
from meshattn.arguments import autocast_type, check_memory
from meshattn.heads import HeadCall
from meshattn.mesh import AttentionMesh
from meshattn.packing import as_written
from meshattn.transport.base import TransportError
from meshattn.trouble import Trouble
from meshattn_kernels.rules import WITHOUT_LSE_GRADIENT

_Result = TypeVar("_Result")


def differentiable_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: AttentionMesh, call: HeadCall, seed: int
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows, as `heads.forward`, differentiable once in the four tensors."""
    # A head axis keeps what its ranks have exchanged, and of q, k and v only where they come from.
    origins = () if call.split.ranks == 1 else tuple(x[:0].clone() for x in (q, k, v))
    result: tuple[Tensor, Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
        q, k, v, sinks, mesh, call, seed, *origins
    )
    return result


def _in_engine_room(mesh: AttentionMesh, call: HeadCall, work: Callable[[], _Result]) -> _Result:
    """Autocast is off, because the engine chooses its types itself; a failed transfer is explained."""
    kind = call.inner.device.type
    try:
        if autocast_type(kind) is None:
            return work()
        with torch.autocast(kind, enabled=False):
            return work()
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
        call: HeadCall,
        seed: int,
        *origins: Tensor,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = map(as_written, (q, k, v))
        sinks = None if sinks is None else as_written(sinks)
        work = partial(heads.forward, call, q, k, v, sinks, seed)
        out, lse, kept = _in_engine_room(mesh, call, work)
        saved = out, lse, sinks, *origins, *kept
        ctx.save_for_backward(*saved)  # type: ignore[arg-type]  # None is allowed
        ctx.saved_looks = _looks(saved)  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.call, ctx.seed = mesh, call, seed  # type: ignore[attr-defined]
        ctx.number = mesh.agreement.calls  # type: ignore[attr-defined]
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():  # by compiled autograd
            from meshattn import graph_break

            untraced: tuple[Tensor | None, ...] = graph_break.gradients(ctx, do, dlse)
            return untraced
        return gradients(ctx, do, dlse)


def gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The backward pass of a call: None for what is no tensor."""
    ctx.mesh.require_open()
    trouble = Trouble()
    with trouble:  # a tensor may have been changed in place, and hooks that bring them back may fail
        saved = ctx.saved_tensors
        _check_saved(saved, ctx.saved_looks)
        out, lse, sinks, *kept = saved
        origins = kept[:3]
        if ctx.call.split.ranks > 1:
            kept = kept[3:]
        dout = torch.zeros_like(out) if do is None else as_written(do)  # None: only lse is used
        dlse = None if dlse is None else as_written(dlse)
        _check_gradient(ctx.call.inner.kernel.name, dout, dlse)
    with ctx.mesh.agreement.one_thread, torch.no_grad():
        # Ranks that came to their backward passes in another order would add up each other's gradients.
        before = ctx.mesh.agreement.calls - ctx.number
        which = f"that of {before} calls before" if before else "that of the call just before"
        ctx.mesh.agreement.enter("backward", {"forward pass": which}, trouble)
        work = partial(heads.backward, ctx.call, kept, out, lse, dout, dlse, sinks, ctx.seed)
        grads = _in_engine_room(ctx.mesh, ctx.call, work)
    if torch.is_grad_enabled():  # create_graph=True: somebody may differentiate the gradients
        sources = [x for x in (*origins, sinks, dout, dlse) if x is not None]
        some = [x for x in grads if x is not None]
        some = _Undifferentiable.apply(len(some), *some, *sources)  # type: ignore[no-untyped-call]
        grads = *some, *grads[len(some) :]
    return *grads, *[None] * (len(ctx.needs_input_grad) - len(grads))


_Look = tuple[torch.Size, torch.dtype, torch.device]


def _looks(saved: Sequence[Tensor | None]) -> list[_Look | None]:
    return [None if x is None else (x.shape, x.dtype, x.device) for x in saved]


def _check_saved(saved: Sequence[Tensor | None], looked: Sequence[_Look | None]) -> None:
    """Hooks on saved tensors may keep them elsewhere, but must bring them back."""
    looks = _looks(saved)
    if looks == looked:
        return
    # With a head axis those of each group of heads come behind.
    names = itertools.chain(("out", "lse", "sinks", "q", "k", "v"), itertools.cycle(("q", "k", "v", "lse")))
    name, before, now = next(x for x in zip(names, looked, looks, strict=False) if x[1] != x[2])
    was, came = (f"{list(x[0])} {x[1]} on {x[2]}" if x else "nothing" for x in (before, now))
    raise ValueError(
        f"a hook on saved tensors has changed {name}, which the backward pass needs: it was {was} and came "
        f"back as {came}; what unpacks in saved_tensors_hooks(pack, unpack) must return a tensor of the same "
        "shape and type on the same device"
    )


def _check_gradient(kernel: str, do: Tensor, dlse: Tensor | None) -> None:
    check_memory("the gradient of out", do)  # which is_grads_batched=True has not
    if dlse is None:
        return
    check_memory("the gradient of lse", dlse)
    if kernel in WITHOUT_LSE_GRADIENT:
        raise NotImplementedError(
            f"a gradient flows through lse, which kernel {kernel!r} cannot take: detach lse, or choose "
            "another kernel"
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
