"""The one loop that executes a step list on one rank, forward and backward, for every tile.

A step list (`meshattn.plan.schedule`) says when to wait, merge, send and compute; a pass (`_Forward`,
`_Backward`) knows the tensors that its entries mean. Ring-Attention is the list of the tile (1, P): there
is no other code for it.

Shapes: B batch, C and C_kv rows of a query and of a key/value chunk, H and H_kv query and key/value heads, D
    and D_v head sizes of q, k and of v, out.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

from torch import Tensor

from meshattn.packing import Views
from meshattn.pass_memory import Accumulators, Chunks
from meshattn.plan.schedule import Block, Merge, Payload, Transfer
from meshattn.program import Call, Program
from meshattn.sinks import add_sinks
from meshattn.transport.base import Handle
from meshattn_kernels import AttentionKernel, Intervals
from meshattn_kernels.contract import AccumulatorKind
from meshattn_kernels.delta import row_delta
from meshattn_kernels.dropout import with_dropout


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
    work = _Forward(call, q, k, v, sinks, seed)
    _run(call, call.forward, work)
    out, lse = work.results
    return out, lse


def backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    do: Tensor,
    delta: Tensor | None = None,
    seed: int = 0,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v; arguments as given to and returned by `forward`, do like out.

    delta is like lse: see `row_terms`; without it, it follows from out.
    """
    assert call.backward is not None, "a call without gradients"
    work = _Backward(call, call.backward, q, k, v, lse, do, delta, out, seed)
    _run(call, call.backward, work)
    dq, dk, dv = work.results
    return dq, dk, dv


def row_terms(out: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Tensor:
    """delta [B, H, C]: what the backward pass subtracts in every row, in the accumulator type.

    dlse is like lse: the gradient that comes in through it, if any.
    """
    delta = row_delta(do, out)
    if dlse is not None:
        # d lse / d score = p, so that ds = p * (dp - delta + dlse); rows that see no key have no score.
        delta = delta - dlse.masked_fill(lse == -math.inf, 0.0)
    return delta


def _run(call: Call, program: Program, work: _Pass) -> None:
    if call.recorder is None:
        _execute(program, work)
    else:
        call.recorder.run(program, work, partial(_execute, program, work))


def _execute(program: Program, work: _Pass) -> None:
    handles: dict[int, Handle] = {}
    work.begin()
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
    work.finish()


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
        self._rows, self._cols = (Chunks(call, program, *chunk) for chunk in chunks.items())
        self._partials: dict[str, Accumulators] = {kind: Accumulators(call, kind) for kind in partials}

    def memory(self) -> Hashable:
        return self._rows.memory(), self._cols.memory(), *[x.memory() for x in self._partials.values()]

    def moved(self) -> list[int]:
        """Addresses in memory of PyTorch's that exchanges read or write."""
        chunks = [*self._rows.moved(), *self._cols.moved()]
        return chunks + [address for partials in self._partials.values() for address in partials.moved()]

    @property
    def results(self) -> tuple[Tensor, ...]:
        return tuple(result for partials in self._partials.values() for result in partials.results)

    def begin(self) -> None:
        """What stands before the list."""

    def finish(self) -> None:
        """What stands behind the list."""
        for partials in self._partials.values():
            partials.finish()

    def _holder(self, transfer: Transfer) -> Chunks | Accumulators:
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
    def __init__(self, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seed: int) -> None:
        super().__init__(call, call.forward, {"q": {"q": q}, "kv": {"k": k, "v": v}}, ("out",), seed)
        self._sinks = sinks

    def memory(self) -> Hashable:
        return super().memory(), None if self._sinks is None else (
            self._sinks.data_ptr(),
            self._sinks.stride(),
        )

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

    def finish(self) -> None:
        if self._sinks is not None:
            add_sinks(self._partials["out"].complete(), self._sinks)
        super().finish()


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
        delta: Tensor | None,
        out: Tensor | None,
        seed: int,
    ) -> None:
        self._do, self._out = do, out
        self._delta = lse.new_empty(lse.shape) if delta is None else delta
        bundle = {"q": q, "do": do, "lse": lse, "delta": self._delta}
        chunks: dict[Payload, Views] = {"bundle": bundle, "kv": {"k": k, "v": v}}
        super().__init__(call, program, chunks, ("dq", "dkv"), seed)

    def memory(self) -> Hashable:
        terms = () if self._out is None else (self._do, self._out)
        return super().memory(), *[(tensor.data_ptr(), tensor.stride()) for tensor in terms]

    def begin(self) -> None:
        if self._out is not None:
            row_delta(self._do, self._out, self._delta)

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
