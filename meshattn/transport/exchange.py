"""One exchange by copy engines: what is put on which stream, and what holds the memory it goes to.

See `slots` for the flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor

from meshattn.packing import Packed, Packing
from meshattn.transport.base import Message
from meshattn.transport.cuda_driver import StreamOps
from meshattn.transport.ends import End, Fill, Receiving, RecordedEnd, Replaying, Sending
from meshattn.transport.slots import SlotLayout
from meshattn.transport.watch import Watch, end_process


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
        self.watch = Watch(timeout, ops.enter_thread, end_process)
        self._free_events: list[int] = []
        self._recorded: list[RecordedEnd] | None = None  # while exchanges go into a graph of the mesh
        self._progress = ops.host_word()  # how many ends of the graph that runs are over

    def event(self) -> int:
        return self._free_events.pop() if self._free_events else self.ops.new_event()

    def recycle(self, *events: int) -> None:
        self._free_events.extend(events)

    def record(self) -> None:
        """What is begun from now on goes into a graph."""
        self._recorded = []

    def recorded(self) -> tuple[RecordedEnd, ...]:
        """The halves of all exchanges since `record`, in the order in which they end."""
        assert self._recorded is not None
        ends, self._recorded = tuple(self._recorded), None
        return ends

    def tell_progress(self, more: int) -> None:
        """Into a graph: the communication stream has come as far as the ends that are recorded, and so many
        more. It stands before the event behind an end, or a graph would end without it."""
        if self._recorded is not None:
            self.ops.write(self.ops.comm_stream, self._progress.data_ptr(), len(self._recorded) + more)

    def watched(self, end: End, *events: int) -> None:
        """See that it ends, now or whenever the graph runs that it goes into. The events are its own."""
        if self._recorded is not None:
            if end.word is not None:
                self._recorded.append(RecordedEnd(end.failure, end.fills, end.word))
        elif not self.ops.capturing():
            return self.watch.add(end)
        self.recycle(*events)

    def replay(self, ends: Sequence[RecordedEnd]) -> Replaying:
        """Called before a graph with these ends is launched on the current stream."""
        return Replaying(self, ends)

    def ended(self) -> int:
        """How many ends of the graph that runs are over."""
        return int(self._progress[0])

    def let_go(self, fills: Sequence[Fill], word: int | None) -> None:
        """End what waits for a word: NaN in place of what it stands for, so that nobody computes on with
        wrong numbers unseen."""
        for address, nbytes in fills:
            self.ops.rescue_fill(address, nbytes)
        if word is not None:
            self.ops.rescue_word(word, 1)

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
        self._received = sum(part.nbytes for part in recv or ())
        self._arena = arena
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
            engine.tell_progress(0)  # at first, that none is over
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
            engine.tell_progress(1)
            self._sent = engine.event()
            ops.record(self._sent, comm)
            end = Sending(engine, self.message, self.sources, place.granted, self._sent, begun)
            engine.watched(end, *(() if begun is None else (begun,)))
        elif begun is not None:
            engine.recycle(begun)

    def wait(self) -> None:
        engine, ops, place = self.engine, self.engine.ops, self.place
        engine.watch.check()
        events = [] if self._sent is None else [self._sent]
        if self.recv is not None:
            ops.wait(ops.comm_stream, place.ready, 1)
            ops.write(ops.comm_stream, place.ready, 0)
            engine.tell_progress(1)
            events.append(engine.event())
            ops.record(events[-1], ops.comm_stream)
        if not events:
            return
        ops.wait_event(ops.current_stream(), events[-1])
        self.send = None
        fills, word = ([], None) if self.recv is None else ([(place.slot, self._received)], place.ready)
        engine.watched(Receiving(engine, self.message, fills, word, events[-1], *events[:-1]), *events)

    def release(self) -> None:
        self._arena.open.remove(self.message.slot)
        if self.message.again and self.recv is not None:
            ops, freed = self.engine.ops, self.engine.event()
            ops.record(freed, ops.current_stream())
            self._arena.freed[self.message.slot] = freed
