"""Exchanges by the copy engines of the GPUs of one host: no multiprocessor is taken from the kernels.

A sender pushes into the receiver's slot, which lies in memory that all ranks of the host have mapped, and
streams tell each other by flags (see `slots`) that are written and awaited by stream memory operations. The
host never waits. Every exchange is enqueued before the blocks that hide it and waited for after them, all on
one stream in the order of the list, which is also what keeps a device with one hardware queue
(CUDA_DEVICE_MAX_CONNECTIONS=1) from blocking itself: an operation waits only for operations that stand before
it in the list of steps, or for the grant of the same exchange, which every rank gives first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshattn.packing import Packed, Packing
from meshattn.transport.base import Message, Replay, Traffic, Transport, TransportError
from meshattn.transport.ends import RecordedEnd
from meshattn.transport.exchange import Arena, CopyEngine, Exchange
from meshattn.transport.slots import SlotLayout


class SymmetricTransport(Transport):
    """Exchanges between the ranks of a host.

    Receive memory belongs to a flow along an axis, grows with the largest pass and is kept until `close`.

    Args:
        engine: streams, events, watch and memory.
        whole: the transport that gathers from all ranks of the mesh.
        traffic: counters shared with the other transports of the mesh.
    """

    name = "symmetric"
    records = True
    keeps_memory = True

    def __init__(self, engine: CopyEngine, whole: Transport, traffic: Traffic) -> None:
        super().__init__(traffic)
        self._engine = engine
        self._whole = whole
        self._arenas: dict[tuple[str, str], Arena] = {}
        self._begins = False  # a pass does: nothing has been started in it
        self._outgrown: list[Arena] = []  # that CUDA graphs still use

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

    def _entered(self, axis: str, flow: str, nbytes: int, slots: int) -> Arena:
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
        self._engine.recycle(*arena.freed.values())  # of slots that nothing was received in again
        arena.freed.clear()
        self._enter(arena)
        self._begins = True
        return arena

    def _grow(self, old: Arena | None, axis: str, flow: str, slots: int, nbytes: int) -> Arena:
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
        self.generation += 1
        try:
            region = self._engine.allocate(layout.nbytes)
        except RuntimeError as error:
            raise TransportError(f"receive memory of axis {axis} ({layout.nbytes} bytes): {error}") from error
        return Arena(layout, region, self._engine.ops.current_stream())

    def _enter(self, arena: Arena) -> None:
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

    def _exchange(
        self, message: Message, send: Sequence[Tensor] | None, recv: Sequence[Tensor] | None
    ) -> Exchange:
        self._engine.watch.check()
        arena = self._arenas[message.axis, message.flow]
        assert message.slot not in arena.open, f"{message.label}: slot {message.slot} is still in use"
        arena.open.add(message.slot)
        exchange = Exchange(self._engine, arena, message, send, recv)
        if send is not None or recv is not None:
            # What was there before the pass, and the last use of slots in passes before it.
            exchange.begin(behind_current=message.made or self._begins)
            self._begins = False
        return exchange

    def record(self, forget: Callable[[], None]) -> None:
        self._engine.record()

    def recorded(self) -> tuple[RecordedEnd, ...]:
        return self._engine.recorded()

    def replay(self, recorded: Any) -> Replay:
        return self._engine.replay(recorded)

    def check(self) -> None:
        self._engine.watch.check()

    def all_gather(self, tensor: Tensor) -> Sequence[Tensor]:
        return self._whole.all_gather(tensor)

    def close(self) -> None:
        """Give back the memory, when no rank of the host uses it any more."""
        self._arenas.clear()
        self._outgrown.clear()
