"""What the ranks of a mesh do in one pass, with times and sizes: the input of the emulator.

A script is one list for all ranks, like the step lists that it is made of, in the order in which the engine
queues its work: kernels run one after the other, an exchange starts when the kernels before it have ended,
and a wait holds up the kernels behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cost import Room
from .placement import MeshAxis, Placement

PerRank = tuple[float, ...]
Slot = tuple[MeshAxis, int]
"""Of the chunks of an axis, by number."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Work of the GPU; microseconds, of each rank where they differ. ``steady`` work takes as long beside
    exchanges that take multiprocessors."""

    name: str
    us: float | PerRank
    steady: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """One message sent to the rank at ``offset`` along an axis, and one received from -``offset``.

    ``sends`` says which ranks send, where not all do. ``behind`` exchanges start with the one before and pay
    no latency of their own. Unless ``made``, what is sent was there at the start or came by an exchange that
    has been waited for, and copy engines need not wait for the kernels queued before, but for the `Free` of
    ``slot`` at the receiver, if there is one.
    """

    number: int
    name: str
    axis: MeshAxis
    offset: int
    num_bytes: int
    sends: tuple[bool, ...] | None = None
    behind: bool = False
    made: bool = True
    slot: Slot | None = None


@dataclass(frozen=True, slots=True)
class Free:
    """The kernels queued before were the last to use a slot that a later exchange fills again."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Wait:
    """For both halves of an exchange."""

    number: int


Entry = Kernel | Exchange | Wait | Free


@dataclass(frozen=True)
class Script:
    """One pass on all ranks. ``room`` is what kernels leave to exchanges that take multiprocessors."""

    name: str
    placement: Placement
    entries: tuple[Entry, ...]
    room: Room

    @property
    def num_exchanges(self) -> int:
        return sum(isinstance(entry, Exchange) for entry in self.entries)
