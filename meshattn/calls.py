"""What a public call does: all ranks check it and plan it, once for calls that look alike; then it runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshattn.arguments import (
    Options,
    autocast,
    autocast_type,
    check_kept,
    check_kernel_name,
    check_keys,
    check_options,
    check_seed,
    check_sinks,
    check_tensors,
    check_types,
    is_seed,
    words_of,
)
from meshattn.autograd import differentiable_attention
from meshattn.dropout import DropoutRule
from meshattn.heads import HeadCall
from meshattn.masks import BlockMasks
from meshattn.mesh import AttentionMesh
from meshattn.plan.assignment import Tile
from meshattn.plan.cost import CallShape, pays_to_share
from meshattn.plan.heads import inner_shape
from meshattn.plan.route import route
from meshattn.plan.schedule import Direction
from meshattn.program import Call, Program
from meshattn.sequence import ShardedSequence
from meshattn_kernels import AttentionKernel, choose_kernel, get_kernel
from meshattn_kernels.contract import accumulator_dtype
from meshattn_kernels.sharing import among, leave_room, takes_parts

_KEPT_CALLS = 32  # kinds of calls on one sequence that are not checked again: those of all layers of a model


@dataclass(frozen=True)
class _Ready:
    """A call that was checked and planned. One that looks the same needs only the ranks' agreement."""

    call: HeadCall
    statement: dict[str, str]


def attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: ShardedSequence,
    kv_seq: ShardedSequence | None,
    sinks: Tensor | None,
    dropout_seed: int | None,
    options: Options,
) -> Tensor | tuple[Tensor, Tensor]:
    """One checked call of the public function `name`."""
    if not isinstance(seq, ShardedSequence):
        raise ValueError(f"seq is a {type(seq).__name__}: pass what mesh.sequence(seq_len) returns")
    mesh = seq.mesh
    mesh.require_open()
    keys = seq if kv_seq is None else kv_seq
    with mesh.agreement.one_thread:
        call = _agreed(name, q, k, v, seq, keys, sinks, dropout_seed, options)
        seed = 0 if call.inner.dropout is None else mesh.dropout_seeds.next(dropout_seed, q.device)
        q, k, v = autocast(q, k, v)
        q, k, v = seq.without_gaps(q), keys.without_gaps(k), keys.without_gaps(v)
        out, lse = differentiable_attention(q, k, v, sinks, mesh, call, seed)
    out = seq.without_gaps(out)
    return (out, lse) if options.return_lse else out


def _agreed(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: ShardedSequence,
    keys: ShardedSequence,
    sinks: Tensor | None,
    dropout_seed: int | None,
    options: Options,
) -> HeadCall:
    """The planned call, on which all ranks agree. Collective."""
    kv_seq = None if keys is seq else keys  # the sequence would keep itself alive
    looks = _looks(name, q, k, v, kv_seq, sinks, dropout_seed, options)
    ready: _Ready | None = None
    try:
        ready = seq.ready.get(looks)
    except TypeError:  # an option has no hash
        looks = object()
    if ready is None:
        ready = seq.ready[looks] = _make_ready(name, q, k, v, seq, keys, sinks, dropout_seed, options)
        if len(seq.ready) > _KEPT_CALLS:
            seq.ready.popitem(last=False)
    else:
        seq.mesh.agreement.enter(name, _sequences(seq, keys) | ready.statement)
    return ready.call


def _looks(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_seq: object,
    sinks: Tensor | None,
    dropout_seed: int | None,
    options: Options,
) -> object:
    """What a call on a sequence is checked for and planned from. A new object if it cannot be right."""
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    if not all(isinstance(x, Tensor) and not x.is_nested for x in given):
        return object()
    if not (kv_seq is None or isinstance(kv_seq, ShardedSequence)):
        return object()
    if not is_seed(dropout_seed):
        return object()
    tensors = [
        (type(x), x.shape, x.dtype, x.device, x.layout, x.requires_grad, x.is_inference()) for x in given
    ]
    modes = torch.is_grad_enabled(), autocast_type(q.device.type), dropout_seed is None
    causal, scale, window, *others = options
    # 1 equals 1.0 and True, but not every option takes all of them; a list has no hash.
    types = tuple(map(type, options))
    return name, *tensors, *modes, kv_seq, types, causal, scale, repr(window), *others


def _make_ready(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: ShardedSequence,
    keys: ShardedSequence,
    sinks: Tensor | None,
    dropout_seed: int | None,
    options: Options,
) -> _Ready:
    """Check a call on this rank and with all others, and plan it. Collective."""
    mesh = seq.mesh
    error: Exception | None = None
    chosen = str(options.kernel)
    try:
        check_keys(seq, keys)
        check_options(options)
        check_seed(dropout_seed)
        masks = seq.masks(keys, causal=options.causal, window_size=options.window_size)
        check_types(q, k, v)
        q, k, v = autocast(q, k, v)
        check_tensors(q, k, v, seq, keys)
        check_sinks(sinks, q)
        check_kept(q, k, v, sinks)
        mesh.connection.check_device(q.device)
        local = _check_kernel(options, q, v, masks)
        chosen = local.name
        mesh.split_heads(_shape(q, k, v, options), q.device)
    except Exception as failure:  # whatever it is, the other ranks must not wait for this one
        error = failure
    for sequence in (seq, keys):
        if isinstance(sequence, ShardedSequence) and sequence.mesh is mesh:
            sequence.agree(error)
    # Ranks with other GPUs or versions may choose other kernels, whose accumulators do not fit together.
    statement = _statement(q, k, v, sinks, dropout_seed, options) | {"kernel": chosen}
    mesh.agreement.enter(name, _sequences(seq, keys) | statement, error)
    ring = Tile(1, mesh.chunks) if name == "ring_attention" else None
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
        dropout=options.dropout_p > 0,
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
    scale, most = options.softmax_scale, torch.finfo(exact).max
    for option, divisor in (("softmax_scale", 1.0), ("softmax_scale / softcap", options.softcap)):
        if scale is not None and divisor and scale / divisor > most:
            number = scale / divisor
            raise ValueError(f"{option} is {number}: scores are made in {exact}, so give at most {most:.3g}")
    return local


def _sequences(seq: ShardedSequence, keys: object) -> dict[str, str]:
    if keys is seq:
        return {"sequence": seq.stated}
    kv_words = keys.stated if isinstance(keys, ShardedSequence) else f"a {type(keys).__name__}"
    return {"sequence": seq.stated, "kv_seq": kv_words}


def _statement(
    q: Tensor, k: Tensor, v: Tensor, sinks: object, dropout_seed: object, options: Options
) -> dict[str, str]:
    """What must be the same on all ranks, beside the sequences."""
    tensors = {name: words_of(tensor) for name, tensor in (("q", q), ("k", k), ("v", v))}
    if sinks is not None:
        tensors["sinks"] = words_of(sinks)
    return tensors | options.words() | {"dropout_seed": "not given" if dropout_seed is None else "given"}


def _shape(q: Tensor, k: Tensor, v: Tensor, options: Options) -> CallShape:
    """The call as a rank sees it outside of the head axis."""
    batch, rows, heads, head_dim = q.shape
    exact = accumulator_dtype(q.dtype)
    return CallShape(
        batch=batch,
        rows=rows,
        heads=heads,
        kv_heads=k.shape[2],
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        itemsize=q.dtype.itemsize,
        reduce_itemsize=(options.reduce_dtype or exact).itemsize,
        acc_itemsize=exact.itemsize,
        causal=options.causal,
        key_rows=k.shape[1],
    )


def _plan(
    mesh: AttentionMesh,
    masks: BlockMasks,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    kernel: AttentionKernel,
    tile: Tile | None,
) -> HeadCall:
    connection = mesh.connection
    kernel = among(kernel, q.device, connection.sharers, connection.transport.multiprocessors)
    outside = _shape(q, k, v, options)
    split, groups = mesh.split_heads(outside, q.device)
    # The lists are those of one group: how many there are changes no order, and so no bits.
    whole, shape = inner_shape(outside, split.ranks), inner_shape(outside, split.ranks, groups)
    tile = tile or mesh.tile_for(outside, masks.visibility)
    exact = accumulator_dtype(q.dtype)
    reduce_dtype = options.reduce_dtype or exact
    dropout = DropoutRule(options.dropout_p, masks.q_layout, masks.kv_layout) if options.dropout_p else None
    # A part of the heads would fall into a part of the groups, and dropout counts all heads.
    cuts = takes_parts(kernel) and split.ranks == 1 and dropout is None
    inner = Call(
        forward=_plan_pass("forward", mesh, whole, tile, masks, kernel, q.device, cuts),
        backward=_plan_pass("backward", mesh, whole, tile, masks, kernel, q.device, cuts),
        kernel=kernel,
        dropout=dropout,
        batch=shape.batch,
        rows=shape.rows,
        key_rows=shape.chunk_keys,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        dtype=q.dtype,
        accumulator_dtype=exact,
        reduce_dtype=reduce_dtype,
        dkv_dtype=q.dtype if split.copies == 1 else reduce_dtype,
        softmax_scale=shape.head_dim**-0.5 if options.softmax_scale is None else float(options.softmax_scale),
        device=q.device,
    )
    return HeadCall(inner, split, groups, mesh.head_ranks, mesh.head, mesh.head_transport(q.device))


def _plan_pass(
    direction: Direction,
    mesh: AttentionMesh,
    shape: CallShape,
    tile: Tile,
    masks: BlockMasks,
    kernel: AttentionKernel,
    device: torch.device,
    cuts: bool,
) -> Program:
    pace = mesh.pace(tile)
    taken = route(direction, shape, tile, masks.visibility, mesh.chunk, cuts=cuts, pace=pace)
    transports = mesh.transports(tile, device, taken.paths)
    crowd = max(transport.multiprocessors for transport in transports.values())
    shares = mesh.connection.sharers == 1 and pays_to_share(direction, shape, tile, pace)
    return Program(
        rank=mesh.chunk,
        owners=mesh.owners,
        schedule=taken.schedule,
        assignment=taken.assignment,
        hops=taken.hops,
        transports=transports,
        intervals=masks.block,
        kernel=kernel,
        crowded_kernel=leave_room(kernel, device, crowd) if shares else kernel,
    )
