"""Exchanges by the copy engines of the GPUs of one host: no multiprocessor is taken from the kernels.

A sender pushes into the receiver's slot, which lies in memory that all ranks of the host have mapped, and
streams tell each other by flags (see `slots`) that are written and awaited by stream memory operations. The
host never waits. Every exchange is enqueued before the blocks that hide it and waited for after them, which
is also what keeps a device with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) from blocking itself: an
operation waits only for operations that stand before it in the list of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshattn.transport.base import Message, Traffic, Transport, TransportError
from meshattn.transport.cuda_driver import StreamOps
from meshattn.transport.slots import SlotLayout
from meshattn.transport.watch import Pending, Watch

_NAN_BYTE = 255  # 0xFF repeated is NaN in every float type


@dataclass(frozen=True)
class Region:
    """Memory that exists in the same size on every rank of the host."""

    local: Tensor  # this rank's, flat uint8
    addresses: Mapping[int, int]  # where this process sees each rank's, by mesh rank
    keep: object = None  # what holds the mapping


@dataclass
class _Arena:
    """The receive slots of one flow along one axis."""

    layout: SlotLayout
    region: Region
    stream: int  # the last pass that used it was enqueued there
    captured: bool = False  # a CUDA graph knows its addresses
    neighbours: tuple[int, int] | None = None  # the ranks that this one sends to and receives from
    open: set[int] = field(default_factory=set)  # slots between start and release

    def at(self, rank: int, offset: int) -> int:
        return self.region.addresses[rank] + offset


class CopyEngine:
    """What all transports of one rank share: streams, events, the watch, and how memory is made.

    Args:
        ops: operations on the streams of this rank's device.
        allocate: makes zeroed memory of that many bytes on every rank of the host. Collective.
        rank: this rank of the mesh.
        names: the global ranks in mesh order, for messages.
        timeout: seconds that an exchange may take once nothing of this rank holds it up.
    """

    def __init__(
        self,
        ops: StreamOps,
        allocate: Callable[[int], Region],
        rank: int,
        names: Sequence[int],
        timeout: float,
    ) -> None:
        self.ops = ops
        self.allocate = allocate
        self.rank = rank
        self.names = tuple(names)
        self.watch = Watch(timeout, ops.enter_thread)
        self._free_events: list[int] = []

    def event(self) -> int:
        return self._free_events.pop() if self._free_events else self.ops.new_event()

    def recycle(self, *events: int) -> None:
        self._free_events.extend(events)

    def finish(self) -> bool:
        """Wait for all that this rank has started; False if an exchange has failed."""
        if self.watch.failure is None:
            self.ops.synchronize()
        return self.watch.failure is None

    def close(self) -> None:
        """No more exchanges."""
        self.watch.stop()


class _Exchange:
    """A started exchange, of which the half that is None does not take place; its handle."""

    def __init__(
        self, engine: CopyEngine, arena: _Arena, message: Message, send: Tensor | None, recv: Tensor | None
    ) -> None:
        self._engine = engine
        self._arena = arena
        self._message = message
        self._send = send  # both are kept alive until they are done with
        self._recv = recv
        self._live = not engine.ops.capturing()  # a captured exchange runs later, and often
        self._sent: int | None = None

    def _own(self, offset: int) -> int:
        return self._arena.at(self._engine.rank, offset)

    def push(self) -> None:
        if self._send is None:
            return
        engine, ops, layout = self._engine, self._engine.ops, self._arena.layout
        slot, to = self._message.slot, self._message.to
        comm, taken = ops.comm_stream, self._own(layout.taken(slot))
        begun, self._sent = engine.event(), engine.event()
        ops.record(begun, ops.current_stream())
        ops.wait_event(comm, begun)
        ops.wait(comm, taken, 0)
        ops.write(comm, taken, 1)
        ops.copy(comm, self._arena.at(to, layout.data(slot)), self._send.data_ptr(), self._send.numel())
        ops.write(comm, self._arena.at(to, layout.ready(slot)), 1)
        ops.record(self._sent, comm)
        self._watch("send", f"rank {self._name(to)} did not take it", begun, self._sent, self._give, begun)

    def wait(self) -> None:
        engine, ops = self._engine, self._engine.ops
        engine.watch.check()
        stream = ops.current_stream()
        begun = engine.event()
        ops.record(begun, stream)
        if self._recv is not None:
            ready = self._own(self._arena.layout.ready(self._message.slot))
            ops.wait(stream, ready, 1)
            ops.write(stream, ready, 0)
        if self._sent is not None:
            ops.wait_event(stream, self._sent)
        done = engine.event()
        ops.record(done, stream)
        events = (begun, done) if self._sent is None else (begun, done, self._sent)
        text = f"nothing from rank {self._name(self._message.source)}"
        self._watch("receive", text, begun, done, self._take, *events)

    def release(self) -> None:
        self._arena.open.remove(self._message.slot)
        if self._recv is not None:
            ops, layout = self._engine.ops, self._arena.layout
            sender = self._arena.at(self._message.source, layout.taken(self._message.slot))
            ops.write(ops.current_stream(), sender, 0)

    def _name(self, rank: int) -> int:
        return self._engine.names[rank]

    def _watch(
        self, lane: str, text: str, begun: int, done: int, let_go: Callable[[], None], *events: int
    ) -> None:
        """Hand an end to the watch, which gives back the events once it is done."""
        engine = self._engine
        if not self._live:
            engine.recycle(*events)
            return
        engine.watch.add(
            Pending(
                lane=lane,
                failure=f"{self._message.label}: {text}",
                has_begun=lambda: engine.ops.is_done(begun),
                is_done=lambda: engine.ops.is_done(done),
                let_go=let_go,
                recycle=lambda: engine.recycle(*events),
            )
        )

    def _give(self) -> None:
        """Push without leave of the receiver: NaN, so that nobody computes on with wrong numbers unseen."""
        assert self._send is not None
        ops, layout = self._engine.ops, self._arena.layout
        ops.fill(ops.rescue_stream, self._send.data_ptr(), _NAN_BYTE, self._send.numel())
        ops.write(ops.rescue_stream, self._own(layout.taken(self._message.slot)), 0)

    def _take(self) -> None:
        """Go on without the bytes: NaN takes their place."""
        if self._recv is not None:
            ops, layout = self._engine.ops, self._arena.layout
            ops.fill(ops.rescue_stream, self._recv.data_ptr(), _NAN_BYTE, self._recv.numel())
            ops.write(ops.rescue_stream, self._own(layout.ready(self._message.slot)), 1)


class SymmetricTransport(Transport):
    """Exchanges with the same two neighbours, always.

    The flags of a slot know one sender: on another ring there is other memory. It grows with the largest pass
    and is kept until `close`.

    Args:
        engine: what all rings of this rank share.
        whole: the transport that gathers from all ranks of the mesh.
        traffic: counters shared with the other transports of the mesh.
    """

    name = "symmetric"

    def __init__(self, engine: CopyEngine, whole: Transport, traffic: Traffic) -> None:
        super().__init__(traffic)
        self._engine = engine
        self._whole = whole
        self._arenas: dict[tuple[str, str], _Arena] = {}
        self._outgrown: list[_Arena] = []  # that CUDA graphs still use

    def buffers(self, axis: str, flow: str, nbytes: int, slots: int, device: torch.device) -> list[Tensor]:
        self.check()
        if slots == 0:
            return []
        arena = self._arenas.get((axis, flow))
        if arena is None or not arena.layout.holds(slots, nbytes):
            arena = self._arenas[axis, flow] = self._grow(arena, axis, flow, slots, nbytes)
        if arena.open:
            raise TransportError(
                f"an earlier pass of this mesh broke off with {len(arena.open)} exchange(s) of axis {axis} "
                "under way: build a new mesh"
            )
        self._enter(arena)
        layout, local = arena.layout, arena.region.local
        return [local[layout.data(slot) : layout.data(slot) + nbytes] for slot in range(slots)]

    def _grow(self, old: _Arena | None, axis: str, flow: str, slots: int, nbytes: int) -> _Arena:
        if self._engine.ops.capturing():
            raise ValueError(
                "this call needs more receive memory than any before it, which a CUDA graph cannot allocate: "
                "run it once before it is captured"
            )
        layout = SlotLayout.of(slots, nbytes) if old is None else old.layout.grown_to(slots, nbytes)
        if old is not None:
            self._engine.ops.synchronize()  # all that was sent here has been waited for, so it is over now
            if old.captured:
                self._outgrown.append(old)
            del self._arenas[axis, flow], old  # before the new one is made
        try:
            region = self._engine.allocate(layout.nbytes)
        except RuntimeError as error:
            raise TransportError(f"receive memory of axis {axis} ({layout.nbytes} bytes): {error}") from error
        return _Arena(layout, region, self._engine.ops.current_stream())

    def _enter(self, arena: _Arena) -> None:
        """A pass on another stream must not see the flags of the last one."""
        ops = self._engine.ops
        stream = ops.current_stream()
        if ops.capturing():
            arena.captured = True
        elif arena.stream != stream:
            event = self._engine.event()
            ops.record(event, arena.stream)
            ops.wait_event(stream, event)
            self._engine.recycle(event)
        arena.stream = stream

    def _exchange(self, message: Message, send: Tensor | None, recv: Tensor | None) -> _Exchange:
        self.check()
        arena = self._arenas[message.axis, message.flow]
        begin = arena.region.local.data_ptr() + arena.layout.data(message.slot)
        assert recv is None or recv.data_ptr() == begin, f"{message.label}: not slot {message.slot}"
        for buffer in (send, recv):
            assert buffer is None or (
                buffer.dtype == torch.uint8 and buffer.numel() <= arena.layout.slot_bytes
            )
        assert message.slot not in arena.open, f"{message.label}: slot {message.slot} is still in use"
        neighbours = (message.to, message.source)
        assert arena.neighbours in (None, neighbours), f"{message.label}: another rank fills these slots"
        arena.neighbours = neighbours
        arena.open.add(message.slot)
        exchange = _Exchange(self._engine, arena, message, send, recv)
        exchange.push()
        return exchange

    def check(self) -> None:
        self._engine.watch.check()

    def all_gather(self, tensor: Tensor) -> Sequence[Tensor]:
        return self._whole.all_gather(tensor)

    def close(self) -> None:
        """Give back the memory, when no rank of the host uses it any more."""
        self._arenas.clear()
        self._outgrown.clear()
