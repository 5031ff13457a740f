"""What a public call does: all ranks check it and plan it, once for calls that look alike; then it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshattn.arguments import (
    Arguments,
    autocast,
    check_kept,
    check_keys,
    check_sinks,
    check_tensors,
    check_transforms,
    check_types,
)
from meshattn.autograd import differentiable_attention
from meshattn.dropout import DropoutRule
from meshattn.heads import HeadCall
from meshattn.masks import BlockMasks
from meshattn.mesh import AttentionMesh
from meshattn.options import Options, check_kernel_name, check_options, check_seed
from meshattn.plan.assignment import Tile
from meshattn.plan.cost import CallShape, costs, delay_units, room_for
from meshattn.plan.heads import inner_shape
from meshattn.plan.route import route
from meshattn.plan.schedule import Direction
from meshattn.program import Call, Program
from meshattn.sequence import ShardedSequence
from meshattn.transport.watch import outlasting
from meshattn.trouble import Trouble
from meshattn_kernels import AttentionKernel, choose_kernel, get_kernel
from meshattn_kernels.contract import accumulator_dtype
from meshattn_kernels.rules import REPEATABLE
from meshattn_kernels.sharing import among, delay_some, leave_room, patient, takes_parts

_LONG_BLOCK = 1e12  # floating-point operations, 2 ms on a fast GPU: ten times what enqueueing a block takes
_KEPT_CALLS = 32  # kinds of calls on one sequence that are not checked again: those of all layers of a model


@dataclass(frozen=True)
class _Ready:
    """A call that was checked and planned. One that looks the same needs only the ranks' agreement."""

    call: HeadCall
    statement: dict[str, str]


def attend(given: Arguments) -> Tensor | tuple[Tensor, Tensor]:
    """One checked call of a public function."""
    seq, keys = given.seq, given.keys
    if not isinstance(seq, ShardedSequence):
        raise ValueError(f"seq is a {type(seq).__name__}: pass what mesh.sequence(seq_len) returns")
    mesh = seq.mesh
    mesh.require_open()
    with mesh.agreement.one_thread:
        call = _agreed(given)
        seed = (
            0 if call.inner.dropout is None else mesh.dropout_seeds.next(given.dropout_seed, given.q.device)
        )
        q, k, v = autocast(given.q, given.k, given.v)
        q, k, v = seq.without_gaps(q), keys.without_gaps(k), keys.without_gaps(v)
        out, lse = differentiable_attention(q, k, v, given.sinks, mesh, call, seed)
    out = seq.without_gaps(out)
    return (out, lse) if given.options.return_lse else out


def _agreed(given: Arguments) -> HeadCall:
    """The planned call, on which all ranks agree. Collective."""
    seq, looks = given.seq, given.looks()
    ready: _Ready | None = None
    try:
        ready = seq.ready.get(looks)
    except TypeError:  # an option has no hash
        looks = object()
    if ready is None:
        ready = seq.ready[looks] = _make_ready(given)
        if len(seq.ready) > _KEPT_CALLS:
            seq.ready.popitem(last=False)
    else:
        seq.mesh.agreement.enter(given.name, given.sequences() | ready.statement)
    return ready.call


def _make_ready(given: Arguments) -> _Ready:
    """Check a call on this rank and with all others, and plan it. Collective."""
    seq, keys, options = given.seq, given.keys, given.options
    mesh = seq.mesh
    trouble = Trouble()
    chosen = str(options.kernel)
    with trouble:
        check_transforms(q=given.q, k=given.k, v=given.v, sinks=given.sinks)
        check_keys(seq, keys)
        check_options(options)
        check_seed(given.dropout_seed)
        masks = seq.masks(keys, causal=options.causal, window_size=options.window_size)
        check_types(given.q, given.k, given.v)
        q, k, v = autocast(given.q, given.k, given.v)
        given = given._replace(q=q, k=k, v=v)
        check_tensors(q, k, v, seq, keys)
        check_sinks(given.sinks, q)
        check_kept(q, k, v, given.sinks)
        mesh.connection.check_device(q.device)
        kernel = _check_kernel(options, q, v, masks)
        chosen = kernel.name
        mesh.split_heads(_shape(given), q.device)
    for sequence in (seq, keys):
        if isinstance(sequence, ShardedSequence) and sequence.mesh is mesh:
            sequence.agree(trouble)
    # Ranks with other GPUs or versions may choose other kernels, whose accumulators do not fit together.
    statement = given.statement() | {"kernel": chosen}
    mesh.agreement.enter(given.name, given.sequences() | statement, trouble)
    return _Ready(_plan(given, masks, kernel), statement)


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


def _shape(given: Arguments) -> CallShape:
    """The call as a rank sees it outside of the head axis."""
    q, options = given.q, given.options
    batch, rows, heads, head_dim = q.shape
    exact = accumulator_dtype(q.dtype)
    return CallShape(
        batch=batch,
        rows=rows,
        heads=heads,
        kv_heads=given.k.shape[2],
        head_dim=head_dim,
        head_dim_v=given.v.shape[3],
        itemsize=q.dtype.itemsize,
        reduce_itemsize=(options.reduce_dtype or exact).itemsize,
        acc_itemsize=exact.itemsize,
        causal=options.causal,
        key_rows=given.k.shape[1],
    )


def _plan(given: Arguments, masks: BlockMasks, kernel: AttentionKernel) -> HeadCall:
    mesh, options = given.seq.mesh, given.options
    dtype, device = given.q.dtype, given.q.device
    connection = mesh.connection
    kernel = among(kernel, device, connection.sharers, connection.transport.multiprocessors)
    outside = _shape(given)
    split, groups = mesh.split_heads(outside, device)
    # The lists are those of one group: how many there are changes no order of blocks.
    whole, shape = inner_shape(outside, split.ranks), inner_shape(outside, split.ranks, groups)
    ring = given.name == "ring_attention"
    tile = Tile(1, mesh.chunks) if ring else mesh.tile_for(outside, masks.visibility)
    exact = accumulator_dtype(dtype)
    reduce_dtype = options.reduce_dtype or exact
    dropout = DropoutRule(options.dropout_p, masks.q_layout, masks.kv_layout) if options.dropout_p else None
    # A part of the heads would fall into a part of the groups, and dropout counts all heads.
    cuts = takes_parts(kernel) and split.ranks == 1 and dropout is None
    wanted = given.wants_gradients()
    inner = Call(
        forward=_plan_pass("forward", mesh, whole, tile, masks, kernel, device, cuts),
        backward=_plan_pass("backward", mesh, whole, tile, masks, kernel, device, cuts) if wanted else None,
        kernel=kernel,
        dropout=dropout,
        batch=shape.batch,
        rows=shape.rows,
        key_rows=shape.chunk_keys,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        dtype=dtype,
        accumulator_dtype=exact,
        reduce_dtype=reduce_dtype,
        dkv_dtype=dtype if split.copies == 1 else reduce_dtype,
        softmax_scale=shape.head_dim**-0.5 if options.softmax_scale is None else float(options.softmax_scale),
        device=device,
    )
    recorder = mesh.recorder(device)
    if recorder is not None and _can_be_recorded(inner):
        inner = replace(inner, recorder=recorder)
    return HeadCall(inner, split, groups, mesh.head_ranks, mesh.head, mesh.head_transport(device))


def _can_be_recorded(call: Call) -> bool:
    """Whether passes on the same memory enqueue the same (the numbers of dropout differ), and so fast that
    the host may be the slower one."""
    operations = 4 * call.batch * call.heads * call.rows * call.key_rows * call.head_dim
    passes = (call.forward,) if call.backward is None else (call.forward, call.backward)
    moving = (transport for program in passes for transport in program.moving)
    known = call.kernel.name in REPEATABLE and call.dropout is None
    return known and operations <= _LONG_BLOCK and all(transport.records for transport in moving)


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
    exchanges_of_heads = mesh.head_transport(device).multiprocessors if len(mesh.head_ranks) > 1 else 0
    if crowd or exchanges_of_heads:  # they are to say who is late, before a kernel loses the GPU over it
        kernel = patient(kernel, outlasting(mesh.connection.timeout))
    room = room_for(direction, shape, tile, pace) if mesh.connection.sharers == 1 else "none"

    def beside(moving: int, block: int) -> AttentionKernel:
        if room == "all along":
            return leave_room(kernel, device, crowd)
        return delay_some(kernel, device, crowd, delay_units(moving, block)) if room == "at first" else kernel

    return Program(
        rank=mesh.chunk,
        owners=mesh.owners,
        schedule=taken.schedule,
        assignment=taken.assignment,
        hops=taken.hops,
        transports=transports,
        intervals=masks.block,
        kernel=kernel,
        beside=beside,
        costs=costs(direction, shape, pace),
    )
