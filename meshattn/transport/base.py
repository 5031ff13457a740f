"""What every transport offers: exchanges with two peers, started now and waited for later.

A transport moves flat byte buffers between the ranks of one mesh. It knows nothing of attention: the engine
tells it who gets the bytes, where the others come from, and how to name the exchange in an error or in a
counter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshattn.packing import Packed, Packing


class TransportError(RuntimeError):
    """A transfer failed or timed out; the message names the step, the transfer and the peer."""


@dataclass(frozen=True, eq=False)
class Message:
    """One exchange, as seen by one rank; ranks are counted inside the mesh, 0 to P - 1."""

    phase: str  # "forward" or "backward"
    axis: str  # "row", "col" or "heads"
    flow: str  # "inward" (chunks) or "outward" (partial results)
    label: str  # names the exchange for people: "forward step 3, kv #2"
    to: int
    source: int
    slot: int = 0  # which of the receiver's buffers is filled, the same on all ranks
    made: bool = True
    """Whether what is sent was made since the pass began. If not, it was there then, or came by an exchange
    that has been waited for: it need not wait for other work to end."""
    again: bool = False
    """Whether the slot is filled again in the same pass, by an exchange of which nothing is ``made``."""


@dataclass(frozen=True)
class TrafficRecord:
    """Messages sent and bytes of one rank since the last reset, for one phase, axis and flow."""

    phase: str
    axis: str
    flow: str
    messages: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


Counts = Mapping[tuple[str, str, str], tuple[int, int, int]]
"""Messages sent, bytes sent and bytes received, by phase, axis and flow."""


class Traffic:
    """Counts what is really handed to the send and receive calls."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], list[int]] = {}

    def counts(self) -> Counts:
        """What has been counted."""
        return {key: (messages, sent, received) for key, (messages, sent, received) in self._counts.items()}

    def take_back(self, before: Counts) -> Counts:
        """Count only what was counted ``before``; what came since."""
        since = {}
        for key, (messages, sent, received) in self._counts.items():
            was = before.get(key, (0, 0, 0))
            since[key] = messages - was[0], sent - was[1], received - was[2]
        self._counts = {key: list(counts) for key, counts in before.items()}
        return {key: counts for key, counts in since.items() if any(counts)}

    def add(self, counts: Counts) -> None:
        """Count the same once more."""
        for key, added in counts.items():
            known = self._counts.setdefault(key, [0, 0, 0])
            for place, number in enumerate(added):
                known[place] += number

    def count(self, message: Message, send: Sequence[Tensor] | None, recv: Sequence[Tensor] | None) -> None:
        if send is None and recv is None:
            return
        for part in (*(send or ()), *(recv or ())):
            assert part.is_contiguous(), message.label
        key = message.phase, message.axis, message.flow
        counts = self._counts.get(key) or self._counts.setdefault(key, [0, 0, 0])
        if send is not None:
            counts[0] += 1
            counts[1] += sum([part.nbytes for part in send])
        if recv is not None:
            counts[2] += sum([part.nbytes for part in recv])

    def records(self) -> tuple[TrafficRecord, ...]:
        return tuple(TrafficRecord(*key, *self._counts[key]) for key in sorted(self._counts))

    def reset(self) -> None:
        self._counts.clear()


class Handle(Protocol):
    """A started exchange."""

    def wait(self) -> None:
        """Until this returns (or, on a GPU, until the current stream passes this point) neither buffer may
        be touched."""

    def release(self) -> None:
        """The received bytes are not needed any more and the own onward send of them is done: the slot may
        be refilled."""


Exchange = tuple[Message, Sequence[Tensor] | None, Sequence[Tensor] | None]
"""A message, what is sent, and where it is received."""


class Replay(Protocol):
    """A graph that is about to be launched on the current stream."""

    def enqueued(self) -> None:
        """It has been: see that its exchanges end."""
        ...


class _All:
    """Several started exchanges."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    def release(self) -> None:
        for handle in self._handles:
            handle.release()


class Transport(ABC):
    """Exchanges between the ranks of one mesh; all ranks start the same exchanges in the same order."""

    name: str
    multiprocessors: int = 0
    """How many an exchange takes away from kernels on the same GPU while it runs."""
    records: bool = False
    """Whether its exchanges can go into a CUDA graph of the mesh."""
    keeps_memory: bool = False
    """Whether what it receives in is its own and stays where it is."""
    generation: int = 0
    """Grows when memory moves that exchanges go to, so that recorded ones would miss it."""

    def __init__(self, traffic: Traffic | None = None) -> None:
        self.traffic = Traffic() if traffic is None else traffic

    def buffers(self, axis: str, flow: str, nbytes: int, slots: int, device: torch.device) -> list[Tensor]:
        """Flat uint8 buffers that the exchanges of an axis and a flow receive into, until the pass ends.

        Collective: same sizes everywhere. The next pass may get the same memory.
        """
        return [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(slots)]

    def received(
        self, axis: str, flow: str, packing: Packing, slots: int, device: torch.device
    ) -> Sequence[Packed]:
        """`buffers` with the tensors that arrive in them."""
        return [packing.within(x) for x in self.buffers(axis, flow, packing.nbytes, slots, device)]

    def start(self, message: Message, send: Sequence[Tensor] | None, recv: Sequence[Tensor] | None) -> Handle:
        """Send tensors to rank `message.to`, and fill others, one behind the other in one buffer, with those
        from rank `message.source`, one for one of as many bytes; all contiguous.

        A half that is None does not take place, and its peer leaves it out too. Every rank starts every
        exchange all the same, also one of which nothing is left for it.
        """
        self.traffic.count(message, send, recv)
        return self._exchange(message, send, recv)

    def start_together(self, exchanges: Sequence[Exchange]) -> Handle:
        """Start several exchanges, as `start` does one, which may run side by side."""
        for exchange in exchanges:
            self.traffic.count(*exchange)
        return self._exchange_together(exchanges)

    def _exchange_together(self, exchanges: Sequence[Exchange]) -> Handle:
        return _All([self._exchange(*exchange) for exchange in exchanges])

    @abstractmethod
    def _exchange(
        self, message: Message, send: Sequence[Tensor] | None, recv: Sequence[Tensor] | None
    ) -> Handle: ...

    def compute_follows(self) -> None:  # noqa: B027 (optional)
        """The exchanges of a step have been started, and its blocks come next on the current stream."""

    def check(self) -> None:  # noqa: B027 (optional)
        """TransportError if an exchange is known to have failed. Does not wait for anything."""

    def record(self, forget: Callable[[], None]) -> None:
        """The exchanges that follow, up to `recorded`, go into a CUDA graph; ``forget`` drops it and all
        others."""
        raise NotImplementedError

    def recorded(self) -> Any:
        """What `replay` needs of the exchanges since `record`."""
        raise NotImplementedError

    def replay(self, recorded: Any) -> Replay:
        """Called before a graph with these exchanges is launched on the current stream, after `check`."""
        raise NotImplementedError

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Sequence[Tensor]:
        """The tensors of all ranks, in mesh order; same shape and type on every rank. Collective and
        blocking."""

    def close(self) -> None:  # noqa: B027 (an optional hook: most transports own nothing)
        """Give back what the transport holds. Collective."""
