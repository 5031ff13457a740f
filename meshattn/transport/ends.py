"""The ends of exchanges by copy engines: what the watch looks at, one by one or all of a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshattn.transport.exchange import CopyEngine, Exchange

Fill = tuple[int, int]
"""Address and size of memory."""


class End:
    """What the watch looks at: an event behind one half of an exchange, and others that end no later."""

    def __init__(self, exchange: Exchange, done: int, *others: int | None) -> None:
        self._exchange = exchange
        self._done = done
        self._others = [event for event in others if event is not None]

    @property
    def failure(self) -> str:
        raise NotImplementedError

    @property
    def fills(self) -> Sequence[Fill]:
        """The memory of what does not come or go."""
        raise NotImplementedError

    @property
    def word(self) -> int | None:
        """Address of the flag that is waited for, if any."""
        raise NotImplementedError

    def has_begun(self) -> bool:
        """The communication stream comes to it when all that was added before it is done."""
        return True

    def is_done(self) -> bool:
        return self._exchange.engine.ops.is_done(self._done)

    def let_go(self) -> None:
        self._exchange.engine.let_go(self.fills, self.word)

    def recycle(self) -> None:
        self._exchange.engine.recycle(*self._others)


class Sending(End):
    """The other event, if any, is what it waits for on this rank. The one behind it is still waited for, and
    recycled by the other end. Let go, it pushes without leave of the receiver."""

    @property
    def failure(self) -> str:
        message = self._exchange.message
        return f"{message.label}: rank {self._exchange.engine.names[message.to]} did not take it"

    @property
    def fills(self) -> Sequence[Fill]:
        return self._exchange.sources

    @property
    def word(self) -> int:
        return self._exchange.place.granted

    def has_begun(self) -> bool:
        return all(map(self._exchange.engine.ops.is_done, self._others))


class Receiving(End):
    """The other event, if any, is the one behind the sending half. Let go, it goes on without the bytes."""

    @property
    def failure(self) -> str:
        message = self._exchange.message
        return f"{message.label}: nothing from rank {self._exchange.engine.names[message.source]}"

    @property
    def fills(self) -> Sequence[Fill]:
        return [(part.data_ptr(), part.nbytes) for part in self._exchange.recv or ()]

    @property
    def word(self) -> int | None:
        return None if self._exchange.recv is None else self._exchange.place.ready

    def recycle(self) -> None:
        super().recycle()
        self._exchange.engine.recycle(self._done)


@dataclass(frozen=True)
class RecordedEnd:
    """One half of an exchange in a graph. It holds no tensor: memory may go before the graph does."""

    failure: str
    fills: Sequence[Fill]
    word: int


class Replaying:
    """A graph with exchanges that is launched on the current stream; the watch looks at it as a whole."""

    def __init__(self, engine: CopyEngine, ends: Sequence[RecordedEnd]) -> None:
        self._engine = engine
        self._ends = ends
        self._begun = self._recorded_event()
        self._done = self._begun

    def _recorded_event(self) -> int:
        event = self._engine.event()
        self._engine.ops.record(event, self._engine.ops.current_stream())
        return event

    def enqueued(self) -> None:
        engine, behind = self._engine, self._recorded_event()
        comm = engine.ops.comm_stream
        engine.ops.wait_event(comm, behind)
        engine.ops.record(behind, comm)  # not before exchanges that began beside it: the watch goes in order
        self._done = behind
        engine.watch.add(self)

    @property
    def failure(self) -> str:
        return self._ends[min(self._engine.ended(), len(self._ends) - 1)].failure

    def has_begun(self) -> bool:
        return self._engine.ops.is_done(self._begun)

    def is_done(self) -> bool:
        return self._engine.ops.is_done(self._done)

    def let_go(self) -> None:
        for end in self._ends:
            self._engine.let_go(end.fills, end.word)

    def recycle(self) -> None:
        self._engine.recycle(self._begun, self._done)
