"""The public calls and their autograd edge.

Letters: B batch, L rows of a rank's shard, H and H_kv query and key/value heads, D and D_v head sizes of q,
    k and of v, out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from meshattn import engine
from meshattn.arguments import (
    Options,
    autocast,
    autocast_type,
    check_kernel_name,
    check_keys,
    check_kind,
    check_options,
    check_sinks,
    check_tensors,
    check_types,
    words_of,
)
from meshattn.masks import BlockMasks
from meshattn.mesh import AttentionMesh
from meshattn.plan.assignment import Tile
from meshattn.plan.cost import CallShape, pays_to_share
from meshattn.plan.route import route
from meshattn.plan.schedule import Direction
from meshattn.sequence import ShardedSequence
from meshattn.transport.base import TransportError
from meshattn_kernels import AttentionKernel, choose_kernel, get_kernel
from meshattn_kernels.contract import accumulator_dtype
from meshattn_kernels.rules import WITHOUT_LSE_GRADIENT
from meshattn_kernels.sharing import leave_room

_KEPT_CALLS = 32  # kinds of calls on one sequence that are not checked again: those of all layers of a model


def mesh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: ShardedSequence,
    *,
    kv_seq: ShardedSequence | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    deterministic: bool = True,
    return_lse: bool = False,
    reduce_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a whole sequence, spread over the ranks of the mesh that `seq` belongs to (arXiv
    2512.20968).

    Collective: every rank calls it with the same shapes, types and options, and so for the backward pass.
    The result has the same bits on every run. Differentiable once in q, k and v.

    Args:
        q: [B, L, H, D], this rank's rows, as ``seq.shard`` cuts them.
        k: [B, L_kv, H_kv, D], rows of `kv_seq`; H_kv divides H, and query head h uses key/value head
            h // (H / H_kv) (GQA, MQA).
        v: [B, L_kv, H_kv, D_v].
        seq: how the sequence is spread.
        kv_seq: another sequence for keys and values, of the same mesh and of any length; by default `seq`.
            With documents both have equally many, and queries of document d see keys of document d.
        causal: a query sees the keys at its own global position and before. Where there are more or fewer
            keys than queries, the last query is aligned with the last key, in each document if there are
            documents.
        softmax_scale: factor on q k^T, by default D ** -0.5.
        window_size: (left, right) keys that a query sees before and after its own, -1 for no bound; causal
            is right = 0. Together with documents inside each document.
        sinks: [H], a logit for each query head that takes part in the softmax of every row and has no value
            (as in gpt-oss); rows that see no key are not touched. Its gradient on each rank is that of the
            rank's own rows, as for any weight.
        softcap: c > 0 bounds the scores: c * tanh(score / c), as in flash-attn; 0.0 is off. Only the
            "reference" kernel has it.
        deterministic: True refuses kernels that are not bitwise deterministic.
        return_lse: also return lse; gradients flow through it as through out.
        reduce_dtype: type in which partial results travel: the accumulator type (default; float32, float64
            for float64) or the type of q.
        kernel: name of the local kernel, which is taken or refused; None takes the one that `kernel_for`
            names.
        unknown: no other option exists; one that a single rank gives is an error on all.

    Returns:
        out [B, L, H, D_v] in the type of q; with ``return_lse`` also lse [B, H, L], natural log, in the
        accumulator type. Rows that see no key, and padding, have lse -inf; their out and gradients are 0.

    Raises:
        ValueError: wrong shapes, types or options, on every rank alike and before any transfer.
        NotImplementedError: in the backward pass, a gradient through lse with a kernel that would lose it.
        RankMismatchError: a ValueError; the ranks disagree, or one did not come to a call that is compared.
        TransportError: a rank died or stalled during a call; the message names the step and the peer.
    """
    options = Options(
        causal,
        softmax_scale,
        window_size,
        softcap,
        deterministic,
        return_lse,
        reduce_dtype,
        kernel,
        tuple(sorted(unknown)),
    )
    return _outside_graphs("mesh_attention", q, k, v, seq, kv_seq, sinks, options)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: ShardedSequence,
    *,
    kv_seq: ShardedSequence | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    deterministic: bool = True,
    return_lse: bool = False,
    reduce_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Ring-Attention (arXiv 2310.01889): `mesh_attention` with the tile (1, P), whatever the tile of the
    mesh.

    The same engine, arguments, results and errors; the baseline to compare with.
    """
    options = Options(
        causal,
        softmax_scale,
        window_size,
        softcap,
        deterministic,
        return_lse,
        reduce_dtype,
        kernel,
        tuple(sorted(unknown)),
    )
    return _outside_graphs("ring_attention", q, k, v, seq, kv_seq, sinks, options)


def kernel_for(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    kernel: str | None = None,
) -> str:
    """Name of the local kernel that attention runs on such tensors.

    Args:
        device: of q, k and v.
        dtype: of q, k and v; under autocast, its type.
        head_dim: of q and k.
        head_dim_v: of v, by default that of q and k.
        kernel: as given to `mesh_attention`.

    Raises:
        ValueError: a type or head size that attention does not take; no kernel serves them, or the named one
            does not: the message says which would.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    check_kind(dtype, head_dim, head_dim_v)
    check_kernel_name(kernel)
    return choose_kernel(kernel, torch.device(device), dtype, head_dim, head_dim_v)


def _outside_graphs(*arguments: Any) -> Tensor | tuple[Tensor, Tensor]:
    """torch.compile leaves its graph here and comes back after the call: exchanges cannot be traced."""
    if torch.compiler.is_compiling():
        from meshattn.graph_break import attend as untraced

        result: Tensor | tuple[Tensor, Tensor] = untraced(*arguments)
        return result
    return attend(*arguments)


@dataclass(frozen=True)
class _Ready:
    """A call that was checked and planned. One that looks the same needs only the ranks' agreement."""

    call: engine.Call
    statement: dict[str, str]


def attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: ShardedSequence,
    kv_seq: ShardedSequence | None,
    sinks: Tensor | None,
    options: Options,
) -> Tensor | tuple[Tensor, Tensor]:
    """One checked call of the public function `name`."""
    if not isinstance(seq, ShardedSequence):
        raise ValueError(f"seq is a {type(seq).__name__}: pass what mesh.sequence(seq_len) returns")
    mesh = seq.mesh
    mesh.require_open()
    keys = seq if kv_seq is None else kv_seq
    looks = _looks(name, q, k, v, kv_seq, sinks, options)
    ready = seq.ready.get(looks)
    if ready is None:
        ready = seq.ready[looks] = _make_ready(name, q, k, v, seq, keys, sinks, options)
        if len(seq.ready) > _KEPT_CALLS:
            seq.ready.popitem(last=False)
    else:
        mesh.agreement.enter(name, _sequences(seq, keys) | ready.statement)
    q, k, v = autocast(q, k, v)
    q, k, v = seq.without_gaps(q), keys.without_gaps(k), keys.without_gaps(v)
    out, lse = _Attention.apply(q, k, v, sinks, mesh, ready.call)  # type: ignore[no-untyped-call]
    out = seq.without_gaps(out)
    return (out, lse) if options.return_lse else out


def _looks(
    name: str, q: Tensor, k: Tensor, v: Tensor, kv_seq: object, sinks: Tensor | None, options: Options
) -> object:
    """What a call on a sequence is checked for and planned from. A new object if it cannot be right."""
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    if not all(isinstance(x, Tensor) and not x.is_nested for x in given):
        return object()
    if not (kv_seq is None or isinstance(kv_seq, ShardedSequence)):
        return object()
    kind, grad = q.device.type, torch.is_grad_enabled()
    tensors = tuple((x.shape, x.dtype, x.device, x.layout, x.requires_grad) for x in given)
    return name, tensors, grad, autocast_type(kind), kv_seq, repr(options)


def _make_ready(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: ShardedSequence,
    keys: ShardedSequence,
    sinks: Tensor | None,
    options: Options,
) -> _Ready:
    """Check a call on this rank and with all others, and plan it. Collective."""
    mesh = seq.mesh
    error: Exception | None = None
    chosen = str(options.kernel)
    try:
        check_keys(seq, keys)
        check_options(options)
        masks = seq.masks(keys, causal=options.causal, window_size=options.window_size)
        check_types(q, k, v)
        q, k, v = autocast(q, k, v)
        check_tensors(q, k, v, seq, keys)
        check_sinks(sinks, q)
        mesh.connection.check_device(q.device)
        local = _check_kernel(options, q, v, masks)
        chosen = local.name
    except Exception as failure:  # whatever it is, the other ranks must not wait for this one
        error = failure
    for sequence in (seq, keys):
        if isinstance(sequence, ShardedSequence):
            sequence.agree(error)
    # Ranks with other GPUs or versions may choose other kernels, whose accumulators do not fit together.
    statement = _statement(q, k, v, sinks, options) | {"kernel": chosen}
    mesh.agreement.enter(name, _sequences(seq, keys) | statement, error)
    ring = Tile(1, mesh.size) if name == "ring_attention" else None
    return _Ready(_plan(mesh, masks, q, k, v, options, local, ring), statement)


def _check_kernel(options: Options, q: Tensor, v: Tensor, masks: BlockMasks) -> AttentionKernel:
    check_kernel_name(options.kernel)
    plain = masks.gives_plain_blocks
    name = choose_kernel(
        options.kernel,
        q.device,
        q.dtype,
        q.shape[-1],
        v.shape[-1],
        plain_mask=plain,
        softcap=options.softcap > 0,
    )
    local = get_kernel(name, float(options.softcap))
    if options.deterministic and not local.deterministic:
        raise ValueError(
            f"kernel={local.name!r} is not bitwise deterministic: choose another one, "
            "or pass deterministic=False"
        )
    exact = accumulator_dtype(q.dtype)
    if options.reduce_dtype not in (None, q.dtype, exact):
        other = "" if q.dtype == exact else f" or as {q.dtype}"
        raise ValueError(
            f"reduce_dtype={options.reduce_dtype}: partial results travel as {exact} (the default){other}"
        )
    for option, number in (("softmax_scale", options.softmax_scale), ("softcap", options.softcap)):
        most = torch.finfo(exact).max
        if number is not None and number > most:
            raise ValueError(f"{option} is {number}: scores are made in {exact}, so give at most {most:.3g}")
    return local


def _sequences(seq: ShardedSequence, keys: object) -> dict[str, str]:
    if keys is seq:
        return {"sequence": seq.stated}
    kv_words = keys.stated if isinstance(keys, ShardedSequence) else f"a {type(keys).__name__}"
    return {"sequence": seq.stated, "kv_seq": kv_words}


def _statement(q: Tensor, k: Tensor, v: Tensor, sinks: object, options: Options) -> dict[str, str]:
    """What must be the same on all ranks, beside the sequences."""
    tensors = {name: words_of(tensor) for name, tensor in (("q", q), ("k", k), ("v", v))}
    if sinks is not None:
        tensors["sinks"] = words_of(sinks)
    return tensors | options.words()


def _plan(
    mesh: AttentionMesh,
    masks: BlockMasks,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    kernel: AttentionKernel,
    tile: Tile | None,
) -> engine.Call:
    batch, rows, heads, head_dim = q.shape
    exact = accumulator_dtype(q.dtype)
    reduce_dtype = options.reduce_dtype or exact
    shape = CallShape(
        batch=batch,
        rows=rows,
        heads=heads,
        kv_heads=k.shape[2],
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        itemsize=q.dtype.itemsize,
        reduce_itemsize=reduce_dtype.itemsize,
        acc_itemsize=exact.itemsize,
        causal=options.causal,
        key_rows=k.shape[1],
    )
    tile = tile or mesh.tile_for(shape, masks.visibility)
    return engine.Call(
        rank=mesh.rank,
        forward=_plan_pass("forward", mesh, shape, tile, masks, kernel, q.device),
        backward=_plan_pass("backward", mesh, shape, tile, masks, kernel, q.device),
        kernel=kernel,
        intervals=masks.block,
        batch=batch,
        rows=rows,
        key_rows=k.shape[1],
        heads=heads,
        kv_heads=k.shape[2],
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        dtype=q.dtype,
        accumulator_dtype=exact,
        reduce_dtype=reduce_dtype,
        softmax_scale=head_dim**-0.5 if options.softmax_scale is None else float(options.softmax_scale),
        device=q.device,
    )


def _plan_pass(
    direction: Direction,
    mesh: AttentionMesh,
    shape: CallShape,
    tile: Tile,
    masks: BlockMasks,
    kernel: AttentionKernel,
    device: torch.device,
) -> engine.PassPlan:
    taken = route(direction, shape, tile, masks.visibility, mesh.rank)
    transports = mesh.transports(tile, device, taken.paths)
    crowd = max(transport.multiprocessors for transport in transports.values())
    return engine.PassPlan(
        schedule=taken.schedule,
        assignment=taken.assignment,
        hops=taken.hops,
        transports=transports,
        crowded_kernel=leave_room(kernel, device, crowd) if pays_to_share(direction, shape, tile) else kernel,
    )


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
    ) -> tuple[Tensor, Tensor]:
        with _engine_room(mesh, call):
            out, lse = engine.forward(call, q, k, v, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)  # type: ignore[arg-type]  # None is allowed
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.call = mesh, call  # type: ignore[attr-defined]
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
            grads = engine.backward(ctx.call, q, k, v, out, lse, do, dlse, sinks)
        if torch.is_grad_enabled():  # create_graph=True: somebody may differentiate the gradients
            sources = [x for x in (q, k, v, sinks, do, dlse) if x is not None]
            some = [x for x in grads if x is not None]
            some = _Undifferentiable.apply(len(some), *some, *sources)  # type: ignore[no-untyped-call]
            grads = *some, *grads[len(some) :]
        return *grads, None, None


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
