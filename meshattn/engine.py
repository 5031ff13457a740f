"""The one loop that executes a step list on one rank, forward and backward, for every tile.

A step list (`meshattn.plan.schedule`) says when to wait, merge, send and compute; a pass (`_Forward`,
`_Backward`) knows the tensors that its entries mean. Ring-Attention is the list of the tile (1, P): there
is no other code for it.

Shapes: B batch, C and C_kv rows of a query and of a key/value chunk, H and H_kv query and key/value heads, D
    and D_v head sizes of q, k and of v, out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshattn.packing import Packed, Views
from meshattn.plan.schedule import AXIS, Block, Merge, Payload, Transfer
from meshattn.program import Call, Program
from meshattn.sinks import add_sinks
from meshattn.transport.base import Handle
from meshattn_kernels import AttentionKernel, Intervals
from meshattn_kernels.contract import (
    AccumulatorKind,
    add_accumulator,
    clear_accumulator,
)
from meshattn_kernels.delta import row_delta
from meshattn_kernels.dropout import with_dropout
from meshattn_kernels.merge import merge_partial


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        q: [B, C, H, D], this rank's chunk.
        k: [B, C_kv, H_kv, D].
        v: [B, C_kv, H_kv, D_v].
        sinks: [H], see `meshattn.sinks`.
        seed: of dropout, if the call has any.

    Returns:
        out [B, C, H, D_v] in the type of q and lse [B, H, C] in the accumulator type.
    """
    work = _Forward(call, q, k, v, seed)
    _execute(call.forward, work)
    return work.finish(sinks)


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, do: Tensor, delta: Tensor, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v; arguments as given to and returned by `forward`, do like out.

    delta is like lse: see `row_terms`.
    """
    assert call.backward is not None, "a call without gradients"
    work = _Backward(call, call.backward, q, k, v, lse, do, delta, seed)
    _execute(call.backward, work)
    return work.finish()


def row_terms(out: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Tensor:
    """delta [B, H, C]: what the backward pass subtracts in every row, in the accumulator type.

    dlse is like lse: the gradient that comes in through it, if any.
    """
    delta = row_delta(do, out)
    if dlse is not None:
        # d lse / d score = p, so that ds = p * (dp - delta + dlse); rows that see no key have no score.
        delta = delta - dlse.masked_fill(lse == -math.inf, 0.0)
    return delta


def _execute(program: Program, work: _Pass) -> None:
    handles: dict[int, Handle] = {}
    for step in program.steps:
        for waited in step.waits:
            handles[waited].wait()
        for merge in step.merges:
            work.merge(merge)
        for move in step.moves:
            send = work.outgoing(move.transfer) if move.sends else None
            recv = work.incoming(move.transfer) if move.receives else None
            handles[move.transfer.number] = move.transport.start(move.message, send, recv)
        for transport in step.beside:
            transport.compute_follows()
        for block, intervals, kernel in step.blocks:
            work.compute(kernel, block, intervals)
        for released in step.releases:
            handles.pop(released).release()


class _Chunks:
    """The chunk slots of one axis: slot 0 is this rank's own chunk, the others are filled by transfers."""

    def __init__(self, call: Call, program: Program, payload: Payload, own: Views) -> None:
        axis, slots = AXIS[payload], program.schedule.slots
        others = (slots.row if axis == "row" else slots.col) - 1
        self._received: Sequence[Packed] = ()
        self.views: list[Views] = [own]
        if others == 0:  # nothing moves along this axis: the caller's tensors serve as they are
            return
        own = {name: tensor.contiguous() for name, tensor in own.items()}
        packing, transport = call.chunk_packings[payload], program.transports[axis]
        self._received = transport.received(axis, "inward", packing, others, call.device)
        self.views = [own, *(packed.views for packed in self._received)]

    def outgoing(self, transfer: Transfer) -> Sequence[Tensor]:
        slot = transfer.send_slot
        return (self._received[slot - 1].flat,) if slot else tuple(self.views[0].values())

    def incoming(self, transfer: Transfer) -> Sequence[Tensor]:
        received = self._received[transfer.recv_slot - 1]
        return (received.flat,) if transfer.send_slot else tuple(received.views.values())  # as it is sent


class _Accumulators:
    """Partial results of one kind (out, dq or dkv): one slot for each that is live, and buffers for those
    that arrive."""

    def __init__(self, call: Call, kind: AccumulatorKind) -> None:
        line = self._line = call.lines[kind]
        self._kernel = call.kernel
        self._dtype = call.result_dtype(kind)
        self._softmax_scale = call.softmax_scale
        self.moves = line.received > 0
        self._packed: list[Packed] = []
        self._received: Sequence[Packed] = ()
        # One is enough: a partial is sent only after the one before it has gone and its echo is merged.
        self._staging: Packed | None = None
        self.views: list[Views]
        if self.moves:
            self._packed = [line.packing.new(call.device) for _ in range(line.held)]
            self.views = [packed.views for packed in self._packed]
            self._received = line.transport.received(
                line.axis, "outward", line.wire, line.received, call.device
            )
            if line.wire is not line.packing:
                self._staging = line.wire.within(torch.empty_like(self._received[0].flat))
        else:  # tensors of their own, which the caller may get and write to
            self.views = [line.packing.tensors(call.device) for _ in range(line.held)]
        self._plus: Views | None = None
        self._written: set[int] = set()
        self._parts_first = False  # for all parts of the block that is cut

    def first(self, index: int, slot: int, block: Block) -> bool:
        """True for the first block of a row or column: it writes its accumulator without reading it."""
        if block.parts == 1:
            return self._is_new(index)
        if block.part == 0:
            self._parts_first = self._is_new(index)
            if self._parts_first and not self._line.lonely:  # something between the parts adds to all of it
                clear_accumulator(self.views[slot])
                self._parts_first = False
        return self._parts_first

    def _is_new(self, index: int) -> bool:
        if index in self._written:
            return False
        self._written.add(index)
        return True

    def _settle(self, index: int, slot: int) -> None:
        # A row whose blocks are all masked has not been written at all.
        if self._is_new(index):
            clear_accumulator(self.views[slot])

    def outgoing(self, transfer: Transfer) -> Sequence[Tensor]:
        self._settle(transfer.sent, transfer.send_slot)
        if self._staging is None:
            return (self._packed[transfer.send_slot].flat,)
        for name, view in self._staging.views.items():
            view.copy_(self.views[transfer.send_slot][name])
        return (self._staging.flat,)

    def incoming(self, transfer: Transfer) -> Sequence[Tensor]:
        return (self._received[transfer.recv_slot].flat,)

    def merge(self, merge: Merge) -> None:
        self._settle(merge.index, merge.acc)
        mine, theirs = self.views[merge.acc], self._received[merge.recv_slot].views
        if merge.transfer == self._line.last:  # added when the line is finished, which reads it once less
            self._plus = theirs
            return
        if self._line.kind == "out":
            merge_partial(mine["out"], mine["lse"], theirs["out"], theirs["lse"])
        else:
            add_accumulator(mine, theirs)

    def complete(self) -> None:
        """This rank's own row or column holds its result, also if nothing was added to it."""
        self._settle(0, 0)

    def finish(self) -> tuple[Tensor, ...]:
        """This rank's own row or column in the caller's layout and type."""
        self.complete()
        return self._kernel.finish(
            self._line.kind,
            self.views[0],
            dtype=self._dtype,
            softmax_scale=self._softmax_scale,
            plus=self._plus,
        )


class _Pass:
    """What the entries of a step list mean in one direction."""

    def __init__(
        self,
        call: Call,
        program: Program,
        chunks: Mapping[Payload, Views],
        partials: Sequence[AccumulatorKind],
        seed: int,
    ) -> None:
        self._call, self._program, self._seed = call, program, seed
        self._rows, self._cols = (_Chunks(call, program, *chunk) for chunk in chunks.items())
        self._partials: dict[str, _Accumulators] = {kind: _Accumulators(call, kind) for kind in partials}

    def _holder(self, transfer: Transfer) -> _Chunks | _Accumulators:
        if transfer.inward:
            return self._rows if transfer.axis == "row" else self._cols
        return self._partials[transfer.payload]

    def outgoing(self, transfer: Transfer) -> Sequence[Tensor]:
        return self._holder(transfer).outgoing(transfer)

    def incoming(self, transfer: Transfer) -> Sequence[Tensor]:
        return self._holder(transfer).incoming(transfer)

    def merge(self, merge: Merge) -> None:
        self._partials[merge.payload].merge(merge)

    def _dropping(self, kernel: AttentionKernel, block: Block) -> AttentionKernel:
        """The kernel with the dropout of this block, if the call has any."""
        if self._call.dropout is None:
            return kernel
        queries, keys = self._program.chunks(block)
        return with_dropout(kernel, self._call.dropout.block(self._seed, queries, keys))

    def compute(self, kernel: AttentionKernel, block: Block, intervals: Intervals) -> None:
        raise NotImplementedError


class _Forward(_Pass):
    def __init__(self, call: Call, q: Tensor, k: Tensor, v: Tensor, seed: int) -> None:
        super().__init__(call, call.forward, {"q": {"q": q}, "kv": {"k": k, "v": v}}, ("out",), seed)

    def compute(self, kernel: AttentionKernel, block: Block, intervals: Intervals) -> None:
        queries, keys = self._rows.views[block.row_slot], self._cols.views[block.col_slot]
        out = self._partials["out"]
        self._dropping(kernel, block).forward(
            queries["q"],
            keys["k"],
            keys["v"],
            out.views[block.row_acc],
            intervals,
            softmax_scale=self._call.softmax_scale,
            first=out.first(block.row, block.row_acc, block),
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
        program: Program,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        do: Tensor,
        delta: Tensor,
        seed: int,
    ) -> None:
        bundle = {"q": q, "do": do, "lse": lse, "delta": delta}
        chunks: dict[Payload, Views] = {"bundle": bundle, "kv": {"k": k, "v": v}}
        super().__init__(call, program, chunks, ("dq", "dkv"), seed)

    def compute(self, kernel: AttentionKernel, block: Block, intervals: Intervals) -> None:
        queries, keys = self._rows.views[block.row_slot], self._cols.views[block.col_slot]
        dq, dkv = self._partials["dq"], self._partials["dkv"]
        self._dropping(kernel, block).backward(
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
            first_dq=dq.first(block.row, block.row_acc, block),
            first_dkv=dkv.first(block.col, block.col_acc, block),
        )

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        (dq,) = self._partials["dq"].finish()
        dk, dv = self._partials["dkv"].finish()
        return dq, dk, dv
