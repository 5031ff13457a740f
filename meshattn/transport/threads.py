"""A simulated process group: every rank is a thread of this process.

The engine runs unchanged on it, so a schedule of 256 ranks can be tested with real numbers on a laptop. It
is stricter than a network: a receive buffer is filled with NaN until its wait, and the bytes are read from
the sender's own buffer only when the receiver waits, so that reading early, or overwriting a buffer that is
still being sent, gives wrong numbers at once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from meshattn.packing import as_bytes
from meshattn.transport.base import Message, Transport, TransportError

_NAN_BYTE = 255  # 0xFF repeated is NaN in every float type


@dataclass
class _Parcel:
    parts: Sequence[Tensor]
    taken: bool = False


@dataclass
class _Mailbox:
    """What one rank is being sent, by (connection, sender, number of the parcel), and its bell."""

    bell: threading.Condition = field(default_factory=threading.Condition)
    parcels: dict[tuple[int, int, int], _Parcel] = field(default_factory=dict)


class SimulatedWorld:
    """What the ranks of one simulated group share."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a simulated group needs at least one rank, got {size}")
        self.size = size
        self.store = HashStore()
        self.mailboxes = [_Mailbox() for _ in range(size)]
        self.failure: str | None = None

    def groups(self) -> list[SimulatedGroup]:
        """One group object for each rank; each belongs to one thread."""
        return [SimulatedGroup(self, rank) for rank in range(self.size)]

    def abort(self, reason: str) -> None:
        """Make every waiting rank raise: one of them has failed."""
        self.failure = self.failure or reason
        for mailbox in self.mailboxes:
            with mailbox.bell:
                mailbox.bell.notify_all()


@dataclass(frozen=True)
class SimulatedGroup:
    """One rank's view of a simulated group; accepted wherever a ProcessGroup is."""

    world: SimulatedWorld
    rank: int
    _connections: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def next_connection(self) -> int:
        """Number of the connection that this rank opens next; all ranks open theirs in the same order."""
        return next(self._connections)

    @property
    def size(self) -> int:
        return self.world.size


class _ThreadHandle:
    def __init__(
        self,
        transport: ThreadTransport,
        message: Message,
        recv: Sequence[Tensor] | None,
        number: int,
        sent: _Parcel | None,
    ) -> None:
        self._transport = transport
        self._message = message
        self._recv = recv
        self._number = number
        self._sent = sent

    def wait(self) -> None:
        transport, message = self._transport, self._message
        if self._recv is not None:
            parcel = transport.take(message, self._number)
            expected, sent = ([part.nbytes for part in parts] for parts in (self._recv, parcel.parts))
            if expected != sent:
                raise TransportError(
                    f"{message.label}: rank {transport.rank} expected {_told(expected)} bytes from rank "
                    f"{message.source}, which sent {_told(sent)}"
                )
            for into, part in zip(self._recv, parcel.parts, strict=True):
                as_bytes(into).copy_(as_bytes(part))
            transport.acknowledge(message, parcel)
        if self._sent is not None:
            transport.until_taken(message, self._sent)

    def release(self) -> None:
        pass


def _told(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes))


class ThreadTransport(Transport):
    """Exchanges between threads: a rendezvous, as on a network without buffering."""

    name = "threads"

    def __init__(self, group: SimulatedGroup, connection: int, timeout: float) -> None:
        super().__init__()
        self._connection = connection
        self.rank = group.rank
        self._world = group.world
        self._timeout = timeout
        self._posted = [0] * group.size  # parcels so far, by receiver and by sender
        self._expected = [0] * group.size

    def _exchange(
        self, message: Message, send: Sequence[Tensor] | None, recv: Sequence[Tensor] | None
    ) -> _ThreadHandle:
        number = self._expected[message.source]
        if recv is not None:
            for part in recv:
                as_bytes(part).fill_(_NAN_BYTE)
            self._expected[message.source] += 1
        parcel = None if send is None else self._post(message.to, send)
        return _ThreadHandle(self, message, recv, number, parcel)

    def _post(self, to: int, parts: Sequence[Tensor]) -> _Parcel:
        parcel = _Parcel(parts)
        mailbox = self._world.mailboxes[to]
        with mailbox.bell:
            mailbox.parcels[(self._connection, self.rank, self._posted[to])] = parcel
            mailbox.bell.notify_all()
        self._posted[to] += 1
        return parcel

    def take(self, message: Message, number: int) -> _Parcel:
        mailbox = self._world.mailboxes[self.rank]
        key = (self._connection, message.source, number)
        with mailbox.bell:
            self._wait_until(mailbox.bell, lambda: key in mailbox.parcels, message, message.source)
            return mailbox.parcels.pop(key)

    def acknowledge(self, message: Message, parcel: _Parcel) -> None:
        bell = self._world.mailboxes[message.source].bell
        with bell:
            parcel.taken = True
            bell.notify_all()

    def until_taken(self, message: Message, parcel: _Parcel) -> None:
        bell = self._world.mailboxes[self.rank].bell
        with bell:
            self._wait_until(bell, lambda: parcel.taken, message, message.to)

    def _wait_until(
        self, bell: threading.Condition, ready: Callable[[], bool], message: Message, peer: int
    ) -> None:
        deadline = time.monotonic() + self._timeout
        while not ready():
            if self._world.failure is not None:
                raise TransportError(f"{message.label}: no exchange with rank {peer}: {self._world.failure}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransportError(f"{message.label}: nothing from rank {peer} within {self._timeout:g} s")
            bell.wait(left)

    def all_gather(self, tensor: Tensor) -> Sequence[Tensor]:
        # Each rank posts one private copy per peer: nothing has to be kept alive until the slowest rank has
        # read it.
        parts: list[Tensor] = []
        for peer in range(self._world.size):
            self._post(peer, [tensor.detach().clone()])
        for peer in range(self._world.size):
            message = Message("gather", "mesh", "inward", f"all-gather, part of rank {peer}", self.rank, peer)
            number = self._expected[peer]
            self._expected[peer] += 1
            parts.extend(self.take(message, number).parts)
        return parts


__all__ = ["SimulatedGroup", "SimulatedWorld", "ThreadTransport"]
