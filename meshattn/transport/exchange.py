"""One exchange by copy engines: what is put on which stream, and what holds the memory it goes to.

See `slots` for the flags.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor

from meshattn.packing import Packed, Packing
from meshattn.transport.base import Message
from meshattn.transport.cuda_driver import StreamOps
from meshattn.transport.slots import SlotLayout
from meshattn.transport.watch import Watch


@dataclass(frozen=True)
class Region:
    """Memory that exists in the same size on every rank of the host."""

    local: Tensor  # this rank's, flat uint8
    addresses: Mapping[int, int]  # where this process sees each rank's, by mesh rank
    keep: object = None  # what holds the mapping


@dataclass(frozen=True)
class Place:
    """Addresses of an exchange: the slot that is filled and two flags here, and the same on the peers."""

    slot: int
    ready: int
    granted: int
    ready_there: int
    grant: int
    slot_there: int

    @staticmethod
    def of(message: Message, rank: int, region: Region, layout: SlotLayout) -> Place:
        slot, here, there = message.slot, region.addresses[rank], region.addresses[message.to]
        return Place(
            slot=here + layout.data(slot),
            ready=here + layout.ready(slot),
            granted=here + layout.granted(message.to, slot),
            ready_there=there + layout.ready(slot),
            grant=region.addresses[message.source] + layout.granted(rank, slot),
            slot_there=there + layout.data(slot),
        )


@dataclass
class Arena:
    """The receive slots of one flow along one axis."""

    layout: SlotLayout
    region: Region
    stream: int  # the last pass that used it was enqueued there
    captured: bool = False  # a CUDA graph knows its addresses
    views: WeakKeyDictionary[Packing, list[Packed]] = field(default_factory=WeakKeyDictionary)
    places: WeakKeyDictionary[Message, Place] = field(default_factory=WeakKeyDictionary)
    open: set[int] = field(default_factory=set)  # slots between start and release
    freed: dict[int, int] = field(default_factory=dict)  # event after the last use of a slot in this pass


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


class Exchange:
    """A started exchange, of which the half that is None does not take place; its handle.

    All of it runs on the communication stream, in the order of the list, so that what comes in goes on at
    once while kernels are still busy with what came before, and nothing holds up the kernels.
    """

    def __init__(
        self,
        engine: CopyEngine,
        arena: Arena,
        message: Message,
        send: Sequence[Tensor] | None,
        recv: Sequence[Tensor] | None,
    ) -> None:
        self.engine = engine
        self.message = message
        self.send = send  # kept alive until the current stream is behind them
        self.sources = [(part.data_ptr(), part.nbytes) for part in send or ()]
        assert sum(nbytes for _, nbytes in self.sources) <= arena.layout.slot_bytes, message.label
        self.recv = recv
        self._arena = arena
        self._live = not engine.ops.capturing()  # a captured exchange runs later, and often
        self._sent: int | None = None
        place = arena.places.get(message)
        if place is None:
            place = arena.places[message] = Place.of(message, engine.rank, arena.region, arena.layout)
        self.place = place
        assert recv is None or recv[0].data_ptr() == place.slot, f"{message.label}: not slot {message.slot}"

    def begin(self, *, behind_current: bool) -> None:
        """Let the sender fill the slot once all that has used it is over, and push, after what stands now on
        the current stream if that is asked for. The grant is given first, so that two ranks that push to
        each other do not wait in a circle."""
        engine, ops, place = self.engine, self.engine.ops, self.place
        comm, begun = ops.comm_stream, None
        if behind_current:
            begun = engine.event()
            ops.record(begun, ops.current_stream())
            ops.wait_event(comm, begun)
        if self.recv is not None:
            freed = self._arena.freed.pop(self.message.slot, None)
            if freed is not None:
                ops.wait_event(comm, freed)
                engine.recycle(freed)
            ops.write(comm, place.grant, 1)
        if self.send is not None:
            ops.wait(comm, place.granted, 1)
            ops.write(comm, place.granted, 0)
            to = place.slot_there
            for source, nbytes in self.sources:
                ops.copy(comm, to, source, nbytes)
                to += nbytes
            ops.write(comm, place.ready_there, 1)
            self._sent = engine.event()
            ops.record(self._sent, comm)
            if self._live:
                engine.watch.add(_Sending(self, self._sent, begun))
                return
        if begun is not None:
            engine.recycle(begun)

    def wait(self) -> None:
        engine, ops, place = self.engine, self.engine.ops, self.place
        engine.watch.check()
        events = [] if self._sent is None else [self._sent]
        if self.recv is not None:
            ops.wait(ops.comm_stream, place.ready, 1)
            ops.write(ops.comm_stream, place.ready, 0)
            events.append(engine.event())
            ops.record(events[-1], ops.comm_stream)
        if not events:
            return
        ops.wait_event(ops.current_stream(), events[-1])
        self.send = None
        if self._live:
            engine.watch.add(_Receiving(self, events[-1], *events[:-1]))
        else:
            engine.recycle(*events)

    def release(self) -> None:
        self._arena.open.remove(self.message.slot)
        if self.message.again and self.recv is not None:
            ops, freed = self.engine.ops, self.engine.event()
            ops.record(freed, ops.current_stream())
            self._arena.freed[self.message.slot] = freed


class _End:
    """What the watch looks at: an event behind one half of an exchange, and others that end no later."""

    def __init__(self, exchange: Exchange, done: int, *others: int | None) -> None:
        self._exchange = exchange
        self._done = done
        self._others = [event for event in others if event is not None]

    def has_begun(self) -> bool:
        """The communication stream comes to it when all that was added before it is done."""
        return True

    def is_done(self) -> bool:
        return self._exchange.engine.ops.is_done(self._done)

    def recycle(self) -> None:
        self._exchange.engine.recycle(*self._others)


class _Sending(_End):
    """The other event, if any, is what it waits for on this rank. The one behind it is still waited for, and
    recycled by the other end."""

    @property
    def failure(self) -> str:
        message = self._exchange.message
        return f"{message.label}: rank {self._exchange.engine.names[message.to]} did not take it"

    def has_begun(self) -> bool:
        return all(map(self._exchange.engine.ops.is_done, self._others))

    def let_go(self) -> None:
        """Push without leave of the receiver: NaN, so that nobody computes on with wrong numbers unseen."""
        exchange = self._exchange
        for source, nbytes in exchange.sources:
            exchange.engine.ops.rescue_fill(source, nbytes)
        exchange.engine.ops.rescue_word(exchange.place.granted, 1)


class _Receiving(_End):
    """The other event, if any, is the one behind the sending half."""

    @property
    def failure(self) -> str:
        message = self._exchange.message
        return f"{message.label}: nothing from rank {self._exchange.engine.names[message.source]}"

    def let_go(self) -> None:
        """Go on without the bytes: NaN takes their place."""
        exchange = self._exchange
        if exchange.recv is not None:
            for part in exchange.recv:
                exchange.engine.ops.rescue_fill(part.data_ptr(), part.nbytes)
            exchange.engine.ops.rescue_word(exchange.place.ready, 1)

    def recycle(self) -> None:
        super().recycle()
        self._exchange.engine.recycle(self._done)
