"""Exchanges by the copy engines of the GPUs of one host: no multiprocessor is taken from the kernels.

A sender pushes into the receiver's slot, which lies in memory that all ranks of the host have mapped, and
streams tell each other by flags (see `slots`) that are written and awaited by stream memory operations. The
host never waits. Every exchange is enqueued before the blocks that hide it and waited for after them, which
is also what keeps a device with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) from blocking itself: an
operation waits only for operations that stand before it in the list of steps, or for the grant of the same
exchange, which every rank gives first.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from meshattn.packing import Packed, Packing
from meshattn.transport.base import Message, Traffic, Transport, TransportError
from meshattn.transport.cuda_driver import StreamOps
from meshattn.transport.slots import SlotLayout
from meshattn.transport.watch import Watch


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
    views: WeakKeyDictionary[Packing, list[Packed]] = field(default_factory=WeakKeyDictionary)
    open: set[int] = field(default_factory=set)  # slots between start and release


def _end_process(failure: str) -> None:
    """Nothing can free the streams any more: an end with a message is better than none."""
    print(
        f"meshattn: {failure}, and the GPU cannot be freed: ending the process", file=sys.stderr, flush=True
    )
    os.kill(os.getpid(), signal.SIGABRT)


class CopyEngine:
    """What exchanges of one rank need: streams, events, the watch, and how memory is made.

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
        self.watch = Watch(timeout, ops.enter_thread, _end_process)
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
        self,
        engine: CopyEngine,
        arena: _Arena,
        message: Message,
        send: Sequence[Tensor] | None,
        recv: Tensor | None,
    ) -> None:
        self.engine = engine
        self.message = message
        self.send = send  # kept alive until the current stream is behind them
        self.sources = [(part.data_ptr(), part.nbytes) for part in send or ()]
        self.recv = recv
        self._arena = arena
        self._live = not engine.ops.capturing()  # a captured exchange runs later, and often
        self._sent: int | None = None
        mine, slot, layout = arena.region.addresses[engine.rank], message.slot, arena.layout
        self.ready, self.granted = mine + layout.ready(slot), mine + layout.granted(message.to, slot)

    def begin(self) -> None:
        """Let the sender fill the slot, since all that has used it stands before this on the current stream,
        and push. The grant is given first, so that two ranks that push to each other do not wait in a
        circle. All that can be is done by the communication stream, so that it does not hold up kernels."""
        if self.send is None and self.recv is None:
            return
        engine, ops, layout, slot = self.engine, self.engine.ops, self._arena.layout, self.message.slot
        comm, addresses, begun = ops.comm_stream, self._arena.region.addresses, engine.event()
        ops.record(begun, ops.current_stream())
        ops.wait_event(comm, begun)
        if self.recv is not None:
            ops.write(comm, self.ready, 0)
            ops.write(comm, addresses[self.message.source] + layout.granted(engine.rank, slot), 1)
        if self.send is not None:
            there = addresses[self.message.to]
            ops.wait(comm, self.granted, 1)
            ops.write(comm, self.granted, 0)
            to = there + layout.data(slot)
            for source, nbytes in self.sources:
                ops.copy(comm, to, source, nbytes)
                to += nbytes
            ops.write(comm, there + layout.ready(slot), 1)
        self._sent = engine.event()
        ops.record(self._sent, comm)
        if self._live and self.send is not None:
            engine.watch.add(_Sending(self, begun, self._sent))
        else:
            engine.recycle(begun)

    def wait(self) -> None:
        engine, ops = self.engine, self.engine.ops
        engine.watch.check()
        stream = ops.current_stream()
        begun = engine.event()
        ops.record(begun, stream)
        if self._sent is not None:  # before it, the flag of what was here last may still stand
            ops.wait_event(stream, self._sent)
            self.send = None
        if self.recv is not None:
            ops.wait(stream, self.ready, 1)
        done = engine.event()
        ops.record(done, stream)
        if self._live:
            engine.watch.add(_Receiving(self, begun, done, self._sent))
        else:
            engine.recycle(begun, done, *(() if self._sent is None else (self._sent,)))

    def release(self) -> None:
        self._arena.open.remove(self.message.slot)


class _End:
    """What the watch looks at: two events of an exchange."""

    lane: str

    def __init__(self, exchange: _Exchange, begun: int, done: int) -> None:
        self._exchange = exchange
        self._begun = begun
        self._done = done

    def has_begun(self) -> bool:
        return self._exchange.engine.ops.is_done(self._begun)

    def is_done(self) -> bool:
        return self._exchange.engine.ops.is_done(self._done)


class _Sending(_End):
    lane = "send"

    @property
    def failure(self) -> str:
        message = self._exchange.message
        return f"{message.label}: rank {self._exchange.engine.names[message.to]} did not take it"

    def let_go(self) -> None:
        """Push without leave of the receiver: NaN, so that nobody computes on with wrong numbers unseen."""
        exchange = self._exchange
        for source, nbytes in exchange.sources:
            exchange.engine.ops.rescue_fill(source, nbytes)
        exchange.engine.ops.rescue_word(exchange.granted, 1)

    def recycle(self) -> None:
        self._exchange.engine.recycle(self._begun)  # the other one is waited for by the receiving end


class _Receiving(_End):
    lane = "receive"

    def __init__(self, exchange: _Exchange, begun: int, done: int, sent: int | None) -> None:
        super().__init__(exchange, begun, done)
        self._sent = sent

    @property
    def failure(self) -> str:
        message = self._exchange.message
        return f"{message.label}: nothing from rank {self._exchange.engine.names[message.source]}"

    def let_go(self) -> None:
        """Go on without the bytes: NaN takes their place."""
        exchange = self._exchange
        if exchange.recv is not None:
            exchange.engine.ops.rescue_fill(exchange.recv.data_ptr(), exchange.recv.numel())
            exchange.engine.ops.rescue_word(exchange.ready, 1)

    def recycle(self) -> None:
        engine = self._exchange.engine
        engine.recycle(self._begun, self._done, *(() if self._sent is None else (self._sent,)))


class SymmetricTransport(Transport):
    """Exchanges between the ranks of a host.

    Receive memory belongs to a flow along an axis, grows with the largest pass and is kept until `close`.

    Args:
        engine: streams, events, watch and memory.
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

    @property
    def receive_bytes(self) -> int:
        """Memory to receive in, flags included, that this rank has taken."""
        return sum(arena.layout.nbytes for arena in (*self._arenas.values(), *self._outgrown))

    def buffers(self, axis: str, flow: str, nbytes: int, slots: int, device: torch.device) -> list[Tensor]:
        if slots == 0:
            return []
        arena = self._entered(axis, flow, nbytes, slots)
        layout, local = arena.layout, arena.region.local
        return [local[layout.data(slot) : layout.data(slot) + nbytes] for slot in range(slots)]

    def received(
        self, axis: str, flow: str, packing: Packing, slots: int, device: torch.device
    ) -> Sequence[Packed]:
        if slots == 0:
            return ()
        arena = self._entered(axis, flow, packing.nbytes, slots)
        known = arena.views.get(packing)
        if known is None or len(known) < slots:
            layout, local, nbytes = arena.layout, arena.region.local, packing.nbytes
            begins = [layout.data(slot) for slot in range(slots)]
            known = arena.views[packing] = [packing.within(local[at : at + nbytes]) for at in begins]
        return known

    def _entered(self, axis: str, flow: str, nbytes: int, slots: int) -> _Arena:
        """The memory of a flow along an axis, when a pass begins to use it."""
        self.check()
        arena = self._arenas.get((axis, flow))
        if arena is None or not arena.layout.holds(slots, nbytes):
            arena = self._arenas[axis, flow] = self._grow(arena, axis, flow, slots, nbytes)
        if arena.open:
            raise TransportError(
                f"an earlier pass of this mesh broke off with {len(arena.open)} exchange(s) of axis {axis} "
                "under way: build a new mesh"
            )
        self._enter(arena)
        return arena

    def _grow(self, old: _Arena | None, axis: str, flow: str, slots: int, nbytes: int) -> _Arena:
        if self._engine.ops.capturing():
            raise ValueError(
                "this call needs more receive memory than any before it, which a CUDA graph cannot allocate: "
                "run it once before it is captured"
            )
        ranks = len(self._engine.names)
        layout = SlotLayout.of(slots, nbytes, ranks) if old is None else old.layout.grown_to(slots, nbytes)
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

    def _exchange(self, message: Message, send: Sequence[Tensor] | None, recv: Tensor | None) -> _Exchange:
        self.check()
        arena = self._arenas[message.axis, message.flow]
        begin = arena.region.local.data_ptr() + arena.layout.data(message.slot)
        assert recv is None or recv.data_ptr() == begin, f"{message.label}: not slot {message.slot}"
        assert send is None or sum(part.nbytes for part in send) <= arena.layout.slot_bytes
        assert recv is None or recv.numel() <= arena.layout.slot_bytes
        assert message.slot not in arena.open, f"{message.label}: slot {message.slot} is still in use"
        arena.open.add(message.slot)
        exchange = _Exchange(self._engine, arena, message, send, recv)
        exchange.begin()
        return exchange

    def check(self) -> None:
        self._engine.watch.check()

    def all_gather(self, tensor: Tensor) -> Sequence[Tensor]:
        return self._whole.all_gather(tensor)

    def close(self) -> None:
        """Give back the memory, when no rank of the host uses it any more."""
        self._arenas.clear()
        self._outgrown.clear()
