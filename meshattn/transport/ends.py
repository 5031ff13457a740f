"""The ends of exchanges by copy engines: what the watch looks at, one by one or all of a CUDA graph.

None of them holds a tensor: the watch drops them in a thread of its own, where memory that other ranks have
mapped must not be given back. A capture may be under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshattn.transport.base import Message
    from meshattn.transport.exchange import CopyEngine

Fill = tuple[int, int]
"""Address and size of memory."""


class End:
    """One half of an exchange: an event behind it, and others that end no later.

    Args:
        fills: the memory of what comes or goes.
        word: address of the flag that is waited for, if any.
    """

    def __init__(
        self,
        engine: CopyEngine,
        message: Message,
        fills: Sequence[Fill],
        word: int | None,
        done: int,
        *others: int | None,
    ) -> None:
        self._engine = engine
        self._message = message
        self.fills = fills
        self.word = word
        self._done = done
        self._others = [event for event in others if event is not None]

    @property
    def failure(self) -> str:
        raise NotImplementedError

    def has_begun(self) -> bool:
        """The communication stream comes to it when all that was added before it is done."""
        return True

    def is_done(self) -> bool:
        return self._engine.ops.is_done(self._done)

    def let_go(self) -> None:
        self._engine.let_go(self.fills, self.word)

    def recycle(self) -> None:
        self._engine.recycle(*self._others)


class Sending(End):
    """The other event, if any, is what it waits for on this rank. The one behind it is still waited for, and
    recycled by the other end. Let go, it pushes without leave of the receiver."""

    @property
    def failure(self) -> str:
        message = self._message
        return f"{message.label}: rank {self._engine.names[message.to]} did not take it"

    def has_begun(self) -> bool:
        return all(map(self._engine.ops.is_done, self._others))


class Receiving(End):
    """The other event, if any, is the one behind the sending half. Let go, it goes on without the bytes."""

    @property
    def failure(self) -> str:
        message = self._message
        return f"{message.label}: nothing from rank {self._engine.names[message.source]}"

    def recycle(self) -> None:
        super().recycle()
        self._engine.recycle(self._done)


@dataclass(frozen=True)
class RecordedEnd:
    """One half of an exchange in a graph."""

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
