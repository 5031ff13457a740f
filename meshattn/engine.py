"""The one loop that executes a step list on one rank, forward and backward, for every tile.

A step list (`meshattn.plan.schedule`) says when to wait, merge, send and compute; a pass (`_Forward`,
`_Backward`) knows the tensors that its entries mean. Ring-Attention is the list of the tile (1, P): there
is no other code for it.

Shapes: B batch, C and C_kv rows of a query and of a key/value chunk, H and H_kv query and key/value heads, D
    and D_v head sizes of q, k and of v, out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meshattn.packing import Field, Packing
from meshattn.plan.assignment import Assignment
from meshattn.plan.hops import Hops
from meshattn.plan.schedule import Block, Merge, Schedule, Transfer
from meshattn.sinks import add_sinks, sinks_gradient
from meshattn.transport.base import Handle, Message, Transport
from meshattn_kernels import AttentionKernel, Intervals
from meshattn_kernels.contract import ACCUMULATOR_KINDS, AccumulatorKind, clear_accumulator
from meshattn_kernels.delta import row_delta
from meshattn_kernels.merge import merge_partial

Views = Mapping[str, Tensor]


@dataclass(frozen=True)
class PassPlan:
    """What one pass does on one rank."""

    schedule: Schedule
    assignment: Assignment  # which way round its rings it goes
    hops: Hops  # the transfers of the list that take place for this rank
    transports: Mapping[str, Transport]  # by axis
    crowded_kernel: AttentionKernel  # for blocks beside transfers that take multiprocessors


@dataclass(frozen=True)
class Call:
    """What both passes of one attention call share on one rank; no tensors."""

    rank: int
    forward: PassPlan
    backward: PassPlan
    kernel: AttentionKernel
    intervals: Callable[[int, int, int, int], Intervals]  # of query chunk, key chunk, part, parts
    batch: int
    rows: int
    key_rows: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    accumulator_dtype: torch.dtype
    reduce_dtype: torch.dtype
    softmax_scale: float
    device: torch.device

    @cached_property
    def packings(self) -> Mapping[AccumulatorKind, tuple[Packing, Packing]]:
        """How the accumulators of each kind lie here, and how they travel."""
        return {kind: self._packings(kind) for kind in ACCUMULATOR_KINDS}

    def _packings(self, kind: AccumulatorKind) -> tuple[Packing, Packing]:
        shapes = self.kernel.accumulator_shapes(
            kind,
            batch=self.batch,
            rows=self.key_rows if kind == "dkv" else self.rows,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
        )

        def packed(dtype: torch.dtype) -> Packing:
            # lse always moves in full: rounding it would scale whole rows.
            types = {name: self.accumulator_dtype if name == "lse" else dtype for name in shapes}
            return Packing(tuple(Field(name, shape, types[name]) for name, shape in shapes.items()))

        # On a mesh of one rank one block is all that is ever added.
        alone = self.forward.schedule.tile.ranks == 1 and kind in self.kernel.writes_finished
        return packed(self.dtype if alone else self.accumulator_dtype), packed(self.reduce_dtype)


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        q: [B, C, H, D], this rank's chunk.
        k: [B, C_kv, H_kv, D].
        v: [B, C_kv, H_kv, D_v].
        sinks: [H], see `meshattn.sinks`.

    Returns:
        out [B, C, H, D_v] in the type of q and lse [B, H, C] in the accumulator type.
    """
    work = _Forward(call, q, k, v)
    _execute(call, call.forward, work)
    return work.finish(sinks)


def backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of this rank's q, k, v and sinks; arguments as given to and returned by `forward`, do like
    out.

    dlse is like lse: the gradient that comes in through it, if any. That of the sinks is what the rows of
    this rank give.
    """
    delta = row_delta(do, out)
    if dlse is not None:
        # d lse / d score = p, so that ds = p * (dp - delta + dlse); rows that see no key have no score.
        delta = delta - dlse.masked_fill(lse == -math.inf, 0.0)
    work = _Backward(call, q, k, v, lse, do, delta)
    _execute(call, call.backward, work)
    return *work.finish(), None if sinks is None else sinks_gradient(sinks, lse, delta)


def _execute(call: Call, plan: PassPlan, work: _Pass) -> None:
    schedule, transports = plan.schedule, plan.transports
    handles: dict[int, Handle] = {}
    crowding: set[int] = set()  # transfers under way that take multiprocessors from the kernels
    arrived: set[int] = set()
    releases: dict[int, list[int]] = {}
    for number, step in enumerate(schedule.steps):
        for waited in step.waits:
            handles[waited].wait()
            crowding.discard(waited)
        for merge in step.merges:
            if merge.transfer in arrived:
                work.merge(merge)
        moving: set[Transport] = set()
        for transfer in step.transfers:
            message = _message(call.rank, plan, number, transfer)
            transport = transports[transfer.axis]
            send = work.outgoing(transfer) if plan.hops.sends(transfer) else None
            recv = work.incoming(transfer) if plan.hops.receives(transfer) else None
            handles[transfer.number] = transport.start(message, send, recv)
            if not (send is None and recv is None):
                moving.add(transport)
                if transport.multiprocessors:
                    crowding.add(transfer.number)
            if recv is not None:
                arrived.add(transfer.number)
            releases.setdefault(transfer.last_use, []).append(transfer.number)
        if step.blocks:
            for transport in moving:
                transport.compute_follows()
        for block in step.blocks:
            work.block(block, crowded=bool(crowding))
        for released in releases.pop(number, ()):
            handles.pop(released).release()
    assert not handles, f"transfers {sorted(handles)} were never released"


def _message(rank: int, plan: PassPlan, step: int, transfer: Transfer) -> Message:
    schedule, neighbour = plan.schedule, plan.assignment.neighbour
    return Message(
        phase=schedule.direction,
        axis=transfer.axis,
        flow=transfer.way,
        label=f"{schedule.direction} step {step}/{len(schedule.steps)}, {transfer.payload} #{transfer.index}",
        to=neighbour(rank, transfer.axis, transfer.offset),
        source=neighbour(rank, transfer.axis, -transfer.offset),
        slot=transfer.recv_slot - 1 if transfer.inward else transfer.recv_slot,
    )


class _Chunks:
    """The chunk slots of one axis: slot 0 is this rank's own chunk, the others are filled by transfers."""

    def __init__(self, call: Call, transport: Transport, axis: str, slots: int, own: Views) -> None:
        self.views: list[Views] = [own]
        self.flat: list[Tensor] = []
        if slots == 1:  # nothing moves along this axis: the caller's tensors serve as they are
            return
        packing = Packing(tuple(Field(name, tuple(x.shape), x.dtype) for name, x in own.items()))
        first = torch.empty(packing.nbytes, dtype=torch.uint8, device=call.device)
        packing.write(first, own)
        received = transport.buffers(axis, "inward", packing.nbytes, slots - 1, call.device)
        self.flat = [first, *received]
        self.views = [packing.views(buffer) for buffer in self.flat]


class _Accumulators:
    """Partial results of one kind (out, dq or dkv): one slot for each that is live, and buffers for those
    that arrive."""

    def __init__(
        self,
        call: Call,
        transport: Transport,
        kind: AccumulatorKind,
        axis: str,
        slots: int,
        recv_slots: int,
    ) -> None:
        self._kernel = call.kernel
        self._kind = kind
        self._dtype = call.dtype
        self._softmax_scale = call.softmax_scale
        held, self._wire = call.packings[kind]
        self.moves = recv_slots > 0
        self._flat: list[Tensor] = []
        self.views: list[Views]
        if self.moves:
            sizes = [held.nbytes] * slots
            self._flat = [torch.empty(size, dtype=torch.uint8, device=call.device) for size in sizes]
            self.views = [held.views(buffer) for buffer in self._flat]
        else:  # tensors of their own, which the caller may get and write to
            self.views = [held.tensors(call.device) for _ in range(slots)]
        self._received = transport.buffers(axis, "outward", self._wire.nbytes, recv_slots, call.device)
        # One is enough: a partial is sent only after the one before it has gone and its echo is merged.
        self._staging: Tensor | None = None
        if self._wire != held and recv_slots:
            self._staging = torch.empty_like(self._received[0])
        self._written: set[int] = set()

    def first(self, index: int) -> bool:
        """True for the first block of a row or column: it writes its accumulator without reading it."""
        new = index not in self._written
        self._written.add(index)
        return new

    def _settle(self, index: int, slot: int) -> None:
        # A row whose blocks are all masked has not been written at all.
        if self.first(index):
            clear_accumulator(self.views[slot])

    def outgoing(self, transfer: Transfer) -> Tensor:
        self._settle(transfer.sent, transfer.send_slot)
        if self._staging is None:
            return self._flat[transfer.send_slot]
        self._wire.write(self._staging, self.views[transfer.send_slot])
        return self._staging

    def incoming(self, transfer: Transfer) -> Tensor:
        return self._received[transfer.recv_slot]

    def merge(self, merge: Merge) -> None:
        self._settle(merge.index, merge.acc)
        mine, theirs = self.views[merge.acc], self._wire.views(self._received[merge.recv_slot])
        if self._kind == "out":
            merge_partial(mine["out"], mine["lse"], theirs["out"], theirs["lse"])
        else:
            for name, accumulator in mine.items():
                accumulator.add_(theirs[name])

    def complete(self) -> None:
        """This rank's own row or column holds its result, also if nothing was added to it."""
        self._settle(0, 0)

    def finish(self) -> tuple[Tensor, ...]:
        """This rank's own row or column in the caller's layout and type."""
        self.complete()
        return self._kernel.finish(
            self._kind, self.views[0], dtype=self._dtype, softmax_scale=self._softmax_scale
        )


class _Pass:
    """What the entries of a step list mean in one direction."""

    def __init__(
        self, call: Call, plan: PassPlan, row: Views, col: Views, partials: Mapping[AccumulatorKind, str]
    ) -> None:
        slots, transports = plan.schedule.slots, plan.transports
        self._call = call
        self._plan = plan
        self._chunks = {
            "row": _Chunks(call, transports["row"], "row", slots.row, row),
            "col": _Chunks(call, transports["col"], "col", slots.col, col),
        }
        counts = {"row": (slots.row_acc, slots.row_recv), "col": (slots.col_acc, slots.col_recv)}
        self._partials: dict[str, _Accumulators] = {
            kind: _Accumulators(call, transports[axis], kind, axis, *counts[axis])
            for kind, axis in partials.items()
        }

    def outgoing(self, transfer: Transfer) -> Tensor:
        if transfer.inward:
            return self._chunks[transfer.axis].flat[transfer.send_slot]
        return self._partials[transfer.payload].outgoing(transfer)

    def incoming(self, transfer: Transfer) -> Tensor:
        if transfer.inward:
            return self._chunks[transfer.axis].flat[transfer.recv_slot]
        return self._partials[transfer.payload].incoming(transfer)

    def merge(self, merge: Merge) -> None:
        self._partials[merge.payload].merge(merge)

    def block(self, block: Block, *, crowded: bool) -> None:
        call = self._call
        queries = self._plan.assignment.query_chunk(call.rank, block.row)
        keys = self._plan.assignment.key_chunk(call.rank, block.col)
        intervals = call.intervals(queries, keys, block.part, block.parts)
        if not intervals.is_empty:
            kernel = self._plan.crowded_kernel if crowded else call.kernel
            self._compute(kernel, block, intervals)

    def _compute(self, kernel: AttentionKernel, block: Block, intervals: Intervals) -> None:
        raise NotImplementedError


class _Forward(_Pass):
    def __init__(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().__init__(call, call.forward, {"q": q}, {"k": k, "v": v}, {"out": "row"})

    def _compute(self, kernel: AttentionKernel, block: Block, intervals: Intervals) -> None:
        queries, keys = self._chunks["row"].views[block.row_slot], self._chunks["col"].views[block.col_slot]
        out = self._partials["out"]
        kernel.forward(
            queries["q"],
            keys["k"],
            keys["v"],
            out.views[block.row_acc],
            intervals,
            softmax_scale=self._call.softmax_scale,
            first=out.first(block.row),
        )

    def finish(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        partial = self._partials["out"]
        partial.complete()
        if sinks is not None:
            add_sinks(partial.views[0], sinks)
        (out,) = partial.finish()
        lse = partial.views[0]["lse"]
        # A copy: a view would keep the whole accumulator alive until the backward pass.
        return out, lse.clone() if partial.moves else lse


class _Backward(_Pass):
    def __init__(
        self,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        do: Tensor,
        delta: Tensor,
    ) -> None:
        bundle = {"q": q, "do": do, "lse": lse, "delta": delta}
        super().__init__(call, call.backward, bundle, {"k": k, "v": v}, {"dq": "row", "dkv": "col"})

    def _compute(self, kernel: AttentionKernel, block: Block, intervals: Intervals) -> None:
        queries, keys = self._chunks["row"].views[block.row_slot], self._chunks["col"].views[block.col_slot]
        dq, dkv = self._partials["dq"], self._partials["dkv"]
        kernel.backward(
            queries["q"],
            keys["k"],
            keys["v"],
            queries["do"],
            queries["lse"],
            queries["delta"],
            dq.views[block.row_acc],
            dkv.views[block.col_acc],
            intervals,
            softmax_scale=self._call.softmax_scale,
            first_dq=dq.first(block.row),
            first_dkv=dkv.first(block.col),
        )

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        (dq,) = self._partials["dq"].finish()
        dk, dv = self._partials["dkv"].finish()
        return dq, dk, dv
