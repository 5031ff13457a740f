"""Batched send and receive of torch.distributed: gloo on CPU, NCCL on GPUs, by the same code."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshattn.packing import as_bytes
from meshattn.transport.base import Exchange, Message, Replay, Transport, TransportError
from meshattn.transport.groups import end_group
from meshattn.transport.nccl import NcclGroup, may_record, unrecorded
from meshattn.transport.patience import within

# gloo matches by tag; a running number keeps a rank that skipped an exchange from pairing with a later one
_TAGS = 2**31
_PARTS = 8  # tensors of an exchange at most, each with a tag of its own
_GRAPH_GRACE = 10.0  # seconds that a communicator may take to go which graphs have known


@dataclass(frozen=True)
class _Half:
    """One tensor that goes to or comes from a group rank."""

    sends: bool
    buffer: Tensor
    peer: int
    tag: int


class _P2PHandle:
    def __init__(
        self,
        works: Sequence[dist.Work],
        buffers: Sequence[Tensor],
        where: Callable[[], str],
        under_way: set[_P2PHandle],
        behind: Callable[[], None] = lambda: None,
    ) -> None:
        self._works = works
        self._buffers = buffers  # kept alive until all is done
        self._where = where
        self._behind = behind  # called when the current stream waits for all of it
        self._under_way = under_way  # keeps it, and so its buffers, also if a pass breaks off
        under_way.add(self)

    def wait(self) -> None:
        for work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise _failed(self._where(), str(error)) from error
        self._under_way.discard(self)
        self._behind()

    def release(self) -> None:
        pass


def _failed(where: str, reason: str) -> TransportError:
    first = (reason.strip().splitlines() or ["no reason given"])[0]
    return TransportError(
        f"{where} failed; a peer has died, stalled past the timeout, failed itself, or does not make this "
        f"call ({first})"
    )


class P2PTransport(Transport):
    """Exchanges over a process group of its own, so that they never mix with the user's collectives.

    Args:
        group: the process group that carries the data.
        members: its group ranks in mesh order.
        names: the global ranks in mesh order, for messages.
        timeout: seconds that an exchange on a GPU may take once nothing of this rank holds it up; on the CPU
            the group's own timeout counts.
    """

    name = "p2p"

    def __init__(
        self, group: dist.ProcessGroup, members: Sequence[int], names: Sequence[int], timeout: float
    ) -> None:
        super().__init__()
        self.group = group
        if self.uses_nccl:
            self.multiprocessors = NcclGroup.MULTIPROCESSORS
            self.records = may_record()
        self._members = tuple(members)
        self._names = tuple(names)
        self._exchanges = 0
        self._timeout = timeout
        self._nccl: NcclGroup | None = None
        self._under_way: set[_P2PHandle] = set()

    def _exchange(
        self, message: Message, send: Sequence[Tensor] | None, recv: Sequence[Tensor] | None
    ) -> _P2PHandle:
        return self._exchange_together([(message, send, recv)])

    def _exchange_together(self, exchanges: Sequence[Exchange]) -> _P2PHandle:
        halves = [half for exchange in exchanges for half in self._halves(*exchange)]
        buffers = [half.buffer for half in halves]
        where = partial(self._told, [message for message, _, _ in exchanges])
        nccl = self._nccl_of(buffers)
        begun = None if nccl is None else nccl.begin()
        try:
            works = self._batch(halves) if halves else []
        except RuntimeError as error:
            raise _failed(where(), str(error)) from error
        if nccl is not None and works:
            nccl.note(where)
        if nccl is None or begun is None or not works:
            return _P2PHandle(works, buffers, where, self._under_way)
        return _P2PHandle(works, buffers, where, self._under_way, partial(nccl.follow, where, begun))

    def _halves(
        self, message: Message, send: Sequence[Tensor] | None, recv: Sequence[Tensor] | None
    ) -> list[_Half]:
        tag = self._exchanges * _PARTS % _TAGS
        self._exchanges += 1
        to, source = self._members[message.to], self._members[message.source]
        halves = [_Half(True, part.detach(), to, tag + at) for at, part in enumerate(send or ())]
        halves += [_Half(False, part.detach(), source, tag + at) for at, part in enumerate(recv or ())]
        assert len(halves) <= 2 * _PARTS, message.label
        return halves

    def _batch(self, halves: Sequence[_Half]) -> list[dist.Work]:
        """Start all at once, as ``batch_isend_irecv`` does, with less on the way to the backend."""
        backend: Any = self.group._get_backend(halves[0].buffer.device)
        if backend.supports_coalescing:
            backend._start_coalescing()
        works = []
        for half in halves:
            buffer = unrecorded(half.buffer) if half.buffer.is_cuda else half.buffer
            works.append((backend.send if half.sends else backend.recv)([buffer], half.peer, half.tag))
        return [backend._end_coalescing()] if backend.supports_coalescing else works

    def _told(self, messages: Sequence[Message]) -> str:
        return f"{messages[0].label}: {self._peers(messages)}"

    def _peers(self, messages: Sequence[Message]) -> str:
        if len(messages) == 1:
            to, source = self._names[messages[0].to], self._names[messages[0].source]
            return f"the exchange to rank {to} and from rank {source}"
        ranks = ", ".join(str(self._names[message.to]) for message in messages)
        return f"the exchange with ranks {ranks}"

    def _nccl_of(self, buffers: Sequence[Tensor]) -> NcclGroup | None:
        if not buffers or buffers[0].device.type != "cuda" or not self.uses_nccl:
            return None
        if self._nccl is None:
            self._nccl = NcclGroup(self.group, buffers[0].device, self._timeout)
        return self._nccl

    @cached_property
    def uses_nccl(self) -> bool:
        """Whether NCCL moves CUDA tensors."""
        return "nccl" in dist.get_backend_config(self.group)

    def compute_follows(self) -> None:
        if self._nccl is not None:
            self._nccl.give_head_start()

    def record(self, forget: Callable[[], None]) -> None:
        self._used_nccl.record(forget)

    def recorded(self) -> Any:
        return self._used_nccl.recorded()

    def replay(self, recorded: Any) -> Replay:
        return self._used_nccl.replay(recorded)

    @property
    def _used_nccl(self) -> NcclGroup:
        assert self._nccl is not None, "only what has moved before is recorded"
        return self._nccl

    def check(self) -> None:
        if self._nccl is not None:
            self._nccl.check()

    def all_gather(self, tensor: Tensor) -> Sequence[Tensor]:
        mine = as_bytes(tensor.contiguous())  # gloo knows few types
        parts = [torch.empty_like(mine) for _ in self._members]
        try:
            dist.all_gather(parts, mine, group=self.group)
        except RuntimeError as error:
            raise TransportError(f"all-gather over the mesh failed ({error})") from error
        return [parts[member].view(tensor.dtype).view(tensor.shape) for member in self._members]

    def warm_up(self, device: torch.device) -> None:
        """Make the communicators now: a rank that made them inside a pass would hold up the others there."""
        self.all_gather(torch.zeros(1, device=device))

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.close()
        if self._nccl is None or not self._nccl.captured:
            end_group(self.group)
        else:
            self._end_captured()
        # Threads of the group end with the last who knows it. One that still works when the interpreter is
        # taken down aborts the process, and the mesh may be there till then.
        del self.group
        self._nccl = None

    def _end_captured(self) -> None:
        """NCCL waits, without end, until no graph knows the communicator any more."""
        gc.collect()
        try:
            within(_GRAPH_GRACE, lambda: end_group(self.group))
        except TimeoutError as error:
            raise ValueError(
                "CUDA graphs that captured calls on this mesh are still there, and NCCL waits for their end: "
                "delete them, or call their reset(), before mesh.close()"
            ) from error
