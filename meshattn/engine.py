"""The one loop that executes a step list on one rank, forward and backward, for every tile.

A step list (`meshattn.plan.schedule`) says when to wait, merge, send and compute; a pass (`_Forward`, `_Backward`) knows the
tensors that its entries mean. Ring-Attention is the list of the tile (1, P): there is no other code for it.

Shapes: B batch, C rows of a chunk, H and H_kv query and key/value heads, D and D_v head sizes of q, k and of v, out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from einops import einsum
from torch import Tensor

from meshattn.merge import merge_partial
from meshattn.packing import Field, Packing
from meshattn.plan.assignment import Assignment
from meshattn.plan.schedule import Block, Merge, Schedule, Transfer
from meshattn.transport.base import Handle, Message, Transport
from meshattn_kernels import AttentionKernel, Intervals

Views = Mapping[str, Tensor]


@dataclass(frozen=True)
class Call:
    """What both passes of one attention call share on one rank; no tensors."""

    assignment: Assignment
    rank: int
    transports: Mapping[str, Transport]  # by axis
    forward_list: Schedule
    backward_list: Schedule
    kernel: AttentionKernel
    intervals: Callable[[int, int], Intervals]  # of (query chunk, key chunk)
    batch: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    accumulator_dtype: torch.dtype
    reduce_dtype: torch.dtype
    softmax_scale: float
    device: torch.device


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks.

    Args:
        q: [B, C, H, D], this rank's chunk.
        k: [B, C, H_kv, D].
        v: [B, C, H_kv, D_v].

    Returns:
        out [B, C, H, D_v] in the type of q and lse [B, H, C] in the accumulator type.
    """
    work = _Forward(call, q, k, v)
    _execute(call, call.forward_list, work)
    return work.finish()


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v; arguments as given to and returned by `forward`, do like out."""
    work = _Backward(call, q, k, v, out, lse, do)
    _execute(call, call.backward_list, work)
    return work.finish()


class _Pass(Protocol):
    """What the entries of a step list mean."""

    def outgoing(self, transfer: Transfer) -> Tensor: ...
    def incoming(self, transfer: Transfer) -> Tensor: ...
    def merge(self, merge: Merge) -> None: ...
    def block(self, block: Block) -> None: ...


def _execute(call: Call, schedule: Schedule, work: _Pass) -> None:
    handles: dict[int, Handle] = {}
    releases: dict[int, list[int]] = {}
    for number, step in enumerate(schedule.steps):
        for waited in step.waits:
            handles[waited].wait()
        for merge in step.merges:
            work.merge(merge)
        for transfer in step.transfers:
            message = _message(call, schedule, number, transfer)
            transport = call.transports[transfer.axis]
            handles[transfer.number] = transport.start(message, work.outgoing(transfer), work.incoming(transfer))
            releases.setdefault(transfer.last_use, []).append(transfer.number)
        for block in step.blocks:
            work.block(block)
        for released in releases.pop(number, ()):
            handles.pop(released).release()
    assert not handles, f"transfers {sorted(handles)} were never released"


def _message(call: Call, schedule: Schedule, step: int, transfer: Transfer) -> Message:
    assignment, rank = call.assignment, call.rank
    if transfer.axis == "row":
        ring, place = assignment.row_group(rank), assignment.col_index(rank)
    else:
        ring, place = assignment.col_group(rank), assignment.row_index(rank)
    return Message(
        phase=schedule.direction,
        axis=transfer.axis,
        flow="inward" if transfer.inward else "outward",
        label=f"{schedule.direction} step {step} of {len(schedule.steps)}, {transfer.payload} #{transfer.index}",
        to=ring[(place + transfer.offset) % len(ring)],
        source=ring[(place - transfer.offset) % len(ring)],
    )


class _Chunks:
    """The chunk slots of one axis: slot 0 is this rank's own chunk, the others are filled by transfers."""

    def __init__(self, call: Call, axis: str, slots: int, own: Views) -> None:
        self.views: list[Views] = [own]
        self.flat: list[Tensor] = []
        if slots == 1:  # nothing moves along this axis: the caller's tensors serve as they are
            return
        packing = Packing(tuple(Field(name, tuple(x.shape), x.dtype) for name, x in own.items()))
        first = torch.empty(packing.nbytes, dtype=torch.uint8, device=call.device)
        packing.write(first, own)
        received = call.transports[axis].buffers(axis, packing.nbytes, slots - 1, call.device)
        self.flat = [first, *received]
        self.views = [packing.views(buffer) for buffer in self.flat]


class _Accumulators:
    """Partial results of one kind (out, dq or dkv): one slot for each that is live, and buffers for those that arrive."""

    def __init__(self, call: Call, kind: str, axis: str, slots: int, recv_slots: int) -> None:
        self._kernel = call.kernel
        self._kind = kind
        shapes = call.kernel.accumulator_shapes(
            kind,
            batch=call.batch,
            rows=call.rows,
            heads=call.heads,
            kv_heads=call.kv_heads,
            head_dim=call.head_dim,
            head_dim_v=call.head_dim_v,
        )
        held = Packing(tuple(Field(name, shape, call.accumulator_dtype) for name, shape in shapes.items()))
        # lse always moves in full: rounding it would scale whole rows.
        self._wire = Packing(
            tuple(
                Field(name, shape, call.accumulator_dtype if name == "lse" else call.reduce_dtype)
                for name, shape in shapes.items()
            )
        )
        self._flat = [torch.empty(held.nbytes, dtype=torch.uint8, device=call.device) for _ in range(slots)]
        self.views = [held.views(buffer) for buffer in self._flat]
        self._received = call.transports[axis].buffers(axis, self._wire.nbytes, recv_slots, call.device)
        self._staging: list[Tensor] = []
        if self._wire != held:
            self._staging = [torch.empty_like(buffer) for buffer in self._received]
        self._written: set[int] = set()

    def first(self, index: int) -> bool:
        """True for the first block of a row or column: it writes its accumulator without reading it."""
        new = index not in self._written
        self._written.add(index)
        return new

    def _settle(self, index: int, slot: int) -> None:
        # A row whose blocks are all masked has not been written at all.
        if self.first(index):
            self._kernel.clear(self._kind, self.views[slot])

    def outgoing(self, transfer: Transfer) -> Tensor:
        self._settle(transfer.sent, transfer.send_slot)
        if not self._staging:
            return self._flat[transfer.send_slot]
        # The staging buffer is free again with the receive slot of the same number: both end at the transfer's wait.
        staging = self._staging[transfer.recv_slot]
        self._wire.write(staging, self.views[transfer.send_slot])
        return staging

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

    def finish(self, call: Call) -> tuple[Tensor, ...]:
        self._settle(0, 0)
        return self._kernel.finish(
            self._kind, self.views[0], dtype=call.dtype, softmax_scale=call.softmax_scale
        )


def _chunk_ids(call: Call, block: Block) -> tuple[int, int]:
    return call.assignment.query_chunk(call.rank, block.row), call.assignment.key_chunk(call.rank, block.col)


class _Forward:
    def __init__(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
        slots = call.forward_list.slots
        self._call = call
        self._queries = _Chunks(call, "row", slots.row, {"q": q})
        self._keys = _Chunks(call, "col", slots.col, {"k": k, "v": v})
        self._out = _Accumulators(call, "out", "row", slots.row_acc, slots.row_recv)

    def outgoing(self, transfer: Transfer) -> Tensor:
        if transfer.payload == "out":
            return self._out.outgoing(transfer)
        return (self._queries if transfer.axis == "row" else self._keys).flat[transfer.send_slot]

    def incoming(self, transfer: Transfer) -> Tensor:
        if transfer.payload == "out":
            return self._out.incoming(transfer)
        return (self._queries if transfer.axis == "row" else self._keys).flat[transfer.recv_slot]

    def merge(self, merge: Merge) -> None:
        self._out.merge(merge)

    def block(self, block: Block) -> None:
        intervals = self._call.intervals(*_chunk_ids(self._call, block))
        if intervals.is_empty:
            return
        keys = self._keys.views[block.col_slot]
        self._call.kernel.forward(
            self._queries.views[block.row_slot]["q"],
            keys["k"],
            keys["v"],
            self._out.views[block.row_acc],
            intervals,
            softmax_scale=self._call.softmax_scale,
            first=self._out.first(block.row),
        )

    def finish(self) -> tuple[Tensor, Tensor]:
        (out,) = self._out.finish(self._call)
        # A copy: a view would keep the whole accumulator alive until the backward pass.
        return out, self._out.views[0]["lse"].clone()


class _Backward:
    def __init__(self, call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor) -> None:
        slots = call.backward_list.slots
        self._call = call
        kind = call.accumulator_dtype
        delta = einsum(do.to(kind), out.to(kind), "b c h d, b c h d -> b h c")
        self._queries = _Chunks(call, "row", slots.row, {"q": q, "do": do, "lse": lse, "delta": delta})
        self._keys = _Chunks(call, "col", slots.col, {"k": k, "v": v})
        self._dq = _Accumulators(call, "dq", "row", slots.row_acc, slots.row_recv)
        self._dkv = _Accumulators(call, "dkv", "col", slots.col_acc, slots.col_recv)

    def outgoing(self, transfer: Transfer) -> Tensor:
        if not transfer.inward:
            return self._gradients(transfer.payload).outgoing(transfer)
        return (self._queries if transfer.axis == "row" else self._keys).flat[transfer.send_slot]

    def incoming(self, transfer: Transfer) -> Tensor:
        if not transfer.inward:
            return self._gradients(transfer.payload).incoming(transfer)
        return (self._queries if transfer.axis == "row" else self._keys).flat[transfer.recv_slot]

    def merge(self, merge: Merge) -> None:
        self._gradients(merge.payload).merge(merge)

    def _gradients(self, payload: str) -> _Accumulators:
        return self._dq if payload == "dq" else self._dkv

    def block(self, block: Block) -> None:
        intervals = self._call.intervals(*_chunk_ids(self._call, block))
        if intervals.is_empty:
            return
        queries, keys = self._queries.views[block.row_slot], self._keys.views[block.col_slot]
        self._call.kernel.backward(
            queries["q"],
            keys["k"],
            keys["v"],
            queries["do"],
            queries["lse"],
            queries["delta"],
            self._dq.views[block.row_acc],
            self._dkv.views[block.col_acc],
            intervals,
            softmax_scale=self._call.softmax_scale,
            first_dq=self._dq.first(block.row),
            first_dkv=self._dkv.first(block.col),
        )

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        (dq,) = self._dq.finish(self._call)
        dk, dv = self._dkv.finish(self._call)
        return dq, dk, dv
