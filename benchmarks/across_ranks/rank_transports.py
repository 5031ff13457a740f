"""Transports that a benchmark puts in place of the library's, to see what those cost and what they gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshattn.packing import Packed, Packing, as_bytes
from meshattn.transport.base import Handle, Message, Transport


@dataclass(frozen=True)
class _Works:
    """A started exchange, and its buffers until it is done."""

    works: Sequence[dist.Work] = ()
    buffers: Sequence[Tensor] = ()

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def release(self) -> None:
        pass


class Skipped(Transport):
    """Moves nothing: the time of a pass without its transfers. The results are wrong.

    What would arrive is what this rank sent the first time: on zeros or old bytes a GPU takes less power, and
    runs at a higher clock, than on numbers.
    """

    name = "skipped"

    def __init__(self, whole: Transport) -> None:
        super().__init__()
        self._whole = whole
        self._received: WeakKeyDictionary[Packing, Sequence[Packed]] = WeakKeyDictionary()
        self._filled: set[int] = set()

    def received(
        self, axis: str, flow: str, packing: Packing, slots: int, device: torch.device
    ) -> Sequence[Packed]:
        if packing not in self._received:
            self._received[packing] = super().received(axis, flow, packing, slots, device)
        return self._received[packing]

    def _exchange(
        self, message: Message, send: Sequence[Tensor] | None, recv: Sequence[Tensor] | None
    ) -> Handle:
        for part, into in zip(send or (), recv or (), strict=False):
            if into.data_ptr() not in self._filled:
                self._filled.add(into.data_ptr())
                as_bytes(into).copy_(as_bytes(part))
        return _Works()

    def all_gather(self, tensor: Tensor) -> Any:
        return self._whole.all_gather(tensor)

    def close(self) -> None:
        self._whole.close()


class PlainP2P(Transport):
    """`batch_isend_irecv` of every tensor on a process group as PyTorch makes it: NCCL has a stream of normal
    priority and no head start, and attention takes all multiprocessors.

    For a mesh of all ranks in their order.
    """

    name = "plain"

    def __init__(self, whole: Transport) -> None:
        super().__init__()
        self._whole = whole
        self._group: Any = dist.new_group()

    def _exchange(
        self, message: Message, send: Sequence[Tensor] | None, recv: Sequence[Tensor] | None
    ) -> Handle:
        operations = [
            dist.P2POp(do, as_bytes(part), peer, self._group)
            for do, parts, peer in ((dist.isend, send, message.to), (dist.irecv, recv, message.source))
            for part in parts or ()
        ]
        works = dist.batch_isend_irecv(operations) if operations else ()
        return _Works(works, [operation.tensor for operation in operations])

    def all_gather(self, tensor: Tensor) -> Any:
        return self._whole.all_gather(tensor)

    def close(self) -> None:
        dist.destroy_process_group(self._group)
        self._whole.close()
