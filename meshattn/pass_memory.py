"""The tensors of one pass on one rank: chunks, which come in, and accumulators, which may go out.

Letters as in `engine`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from meshattn.packing import Packed, Views
from meshattn.plan.schedule import AXIS, Block, Merge, Payload, Transfer
from meshattn.program import Call, Program
from meshattn_kernels.contract import AccumulatorKind, add_accumulator, clear_accumulator, without_lse
from meshattn_kernels.merge import merge_partial


class Chunks:
    """The chunk slots of one axis: slot 0 is this rank's own chunk, the others are filled by transfers."""

    def __init__(self, call: Call, program: Program, payload: Payload, own: Views) -> None:
        axis, slots = AXIS[payload], program.schedule.slots
        others = (slots.row if axis == "row" else slots.col) - 1
        self._received: Sequence[Packed] = ()
        self._in_pool: Sequence[Packed] = ()
        self.views: list[Views] = [own]
        if others == 0:  # nothing moves along this axis: the caller's tensors serve as they are
            return
        own = {name: tensor.contiguous() for name, tensor in own.items()}
        packing, transport = call.chunk_packings[payload], program.transports[axis]
        self._received = transport.received(axis, "inward", packing, others, call.device)
        self._in_pool = () if transport.keeps_memory else self._received
        self.views = [own, *(packed.views for packed in self._received)]

    def memory(self) -> Hashable:
        """Where the own chunk and those that arrive lie."""
        own = [(tensor.data_ptr(), tensor.stride()) for tensor in self.views[0].values()]
        return *own, *[packed.flat.data_ptr() for packed in self._received]

    def moved(self) -> Iterator[int]:
        """Addresses in memory of PyTorch's that exchanges read or write."""
        if self._received:
            yield from (tensor.data_ptr() for tensor in self.views[0].values())
            yield from (packed.flat.data_ptr() for packed in self._in_pool)

    def outgoing(self, transfer: Transfer) -> Sequence[Tensor]:
        slot = transfer.send_slot
        return (self._received[slot - 1].flat,) if slot else tuple(self.views[0].values())

    def incoming(self, transfer: Transfer) -> Sequence[Tensor]:
        received = self._received[transfer.recv_slot - 1]
        return (received.flat,) if transfer.send_slot else tuple(received.views.values())  # as it is sent


class Accumulators:
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
        self._device = call.device
        self._plus: Views | None = None  # what is added at the end
        self._written: set[int] = set()
        self._parts_first = False  # for the other parts of the block that is cut

    @cached_property
    def _results(self) -> Views:
        """Made when they are asked for: by `memory`, else at the end, when the kernel has given back what it
        keeps for itself while it works, which may be more."""
        return {} if self._line.results is None else self._line.results.tensors(self._device)

    def memory(self) -> Hashable:
        """Where they lie, those that arrive, and the results."""
        staging = [] if self._staging is None else [self._staging]
        places = [packed.flat.data_ptr() for packed in (*self._packed, *self._received, *staging)]
        if not self._packed:
            places += [tensor.data_ptr() for views in self.views for tensor in views.values()]
        return *places, *[tensor.data_ptr() for tensor in self._results.values()]

    def moved(self) -> Iterator[int]:
        """Addresses in memory of PyTorch's that exchanges read or write."""
        staging = [] if self._staging is None else [self._staging]
        received = () if self._line.transport.keeps_memory else self._received
        yield from (packed.flat.data_ptr() for packed in (*self._packed, *received, *staging))

    def first(self, index: int, slot: int, block: Block) -> bool:
        """True for the first block of a row or column: it writes its accumulator without reading it."""
        if block.parts == 1:
            return self._is_new(index)
        if block.part:
            return self._parts_first
        first = self._is_new(index)
        self._parts_first = first and self._line.lonely
        if first and not self._line.lonely:  # something between the parts adds to all of it
            places, views = self._line.later.items(), self.views[slot]
            clear_accumulator(
                {name: views[name].tensor_split((head,), dim)[1] for name, (dim, head) in places}
            )
        return first

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

    def complete(self) -> Views:
        """This rank's own row or column, which holds all of its sum, also if nothing was added to it."""
        self._settle(0, 0)
        return self.views[0]

    def finish(self) -> None:
        """Turn it into the results."""
        own = self.complete()
        if not self._results:
            return
        self._kernel.finish(
            self._line.kind,
            own,
            dtype=self._dtype,
            softmax_scale=self._softmax_scale,
            plus=self._plus,
            into=tuple(without_lse(self._results).values()),
        )
        if "lse" in own:
            self._results["lse"].copy_(own["lse"])

    @property
    def results(self) -> tuple[Tensor, ...]:
        """In the caller's layout and type: out and lse, dq, or dk and dv. Tensors of their own."""
        return tuple((self._results or self.views[0]).values())
