"""The emulator: what all ranks of a mesh do, when, over the links of a topology.

Every rank has a stream of kernels and, for the axes inside a node and for the others, a stream of exchanges,
as the library's transports have. An exchange starts when both ends have come to it (their kernels listed
before it have ended, their streams of exchanges are free; between nodes both directions of an exchange end
together) and when the port of the sender out and that of the receiver in are free. It takes the latency and
its bytes over the bandwidth: of the port inside a node, else of the network card, in equal parts for the
ranks that share the card and send over it in this pass. The host queues one thing after the other and waits
for nothing.

Copy engines (``copy_engines`` of a link) have all that they do on one stream in the order of
the list, arrivals too. What kernels have made waits for them as above; other chunks go on while kernels are
busy, as soon as the slot that they fill is free.

Everything is used in the order of the list, so that every time is a maximum of sums of costs: no time falls
if a cost rises, and equal inputs give equal times. Ranks that do the same and whose neighbours are alike have
the same times, and one of each kind is followed; that is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from .cost import LONGER
from .placement import MeshAxis
from .script import Exchange, Kernel, Script, Slot, Wait
from .topology import Link, Topology

T = TypeVar("T")
PerRank = tuple[float, ...] | tuple[bool, ...]
Key = tuple[MeshAxis, int]
"""An axis and an offset along it."""


class Sends(NamedTuple):
    """Over what a rank sends to another one."""

    us_per_byte: float
    latency: float
    crosses: bool
    """From one node to another."""


@dataclass(frozen=True, slots=True)
class Event:
    """What happened on a rank: ``lane`` is "compute", "node" or "net", the streams; microseconds."""

    rank: int
    lane: str
    name: str
    begin: float
    end: float
    num_bytes: int = 0
    peer: int = -1


@dataclass(frozen=True)
class Timeline:
    """The times of one pass, in microseconds, one entry for each kind of rank."""

    script: Script
    kind: tuple[int, ...]
    """Of each rank."""
    total_us: float
    end_us: tuple[float, ...]
    compute_us: tuple[float, ...]
    """Time of the kernels, with what exchanges take from them."""
    events: tuple[Event, ...]
    """If they were wanted, of one rank of each kind."""

    @property
    def exposed_us(self) -> float:
        """Time in which the busiest rank computes nothing."""
        return self.total_us - max(self.compute_us)

    @cached_property
    def ranks_by_kind(self) -> tuple[int, ...]:
        """The first rank of each kind."""
        return tuple(self.kind.index(kind) for kind in range(len(self.end_us)))


class Fabric:
    """Who exchanges with whom over what, for the keys of one script: on one rank of each kind."""

    def __init__(self, script: Script, topology: Topology, *, every_rank: bool = False) -> None:
        self.topology = topology
        self.placement = script.placement
        exchanges = [entry for entry in script.entries if isinstance(entry, Exchange)]
        self.keys: tuple[Key, ...] = tuple(dict.fromkeys((e.axis, e.offset) for e in exchanges))
        uneven = _uneven(script)
        count = self.placement.ranks if every_rank or uneven else self.placement.period
        self.to = {key: self.placement.peers(*key, count) for key in self.keys}
        self.source = {
            (axis, offset): self.placement.peers(axis, -offset, count) for axis, offset in self.keys
        }
        self.sends = {key: self._sends(key, count) for key in self.keys}
        self.kind = tuple(range(count)) if every_rank else self._alike(count, uneven)
        self.ranks = tuple(self.kind.index(kind) for kind in range(max(self.kind) + 1))

    def _sends(self, key: Key, count: int) -> list[Sends]:
        """Over what each of the ``count`` first ranks sends by a key."""
        node, near = self._nodes, self.topology.inside
        inside = Sends(1 / (1e3 * near.gb_per_s), near.latency_us, crosses=False)
        peers = self.to[key]
        if all(node[rank] == node[peer] for rank, peer in enumerate(peers)):
            return [inside] * count
        far = self.topology.across
        sending, receiving = self._sharers
        by_number = [
            Sends(shared / (1e3 * far.gb_per_s), far.latency_us, crosses=True)
            for shared in range(max(*sending, *receiving) + 1)
        ]
        period = self.placement.period
        return [
            inside
            if node[rank] == node[peer]
            else by_number[max(sending[rank % period], receiving[peer % period])]
            for rank, peer in enumerate(peers)
        ]

    @cached_property
    def _nodes(self) -> list[int]:
        return list(map(self.placement.node, range(self.placement.ranks)))

    @cached_property
    def _sharers(self) -> tuple[list[int], list[int]]:
        return self.placement.sharers(self.keys)

    def _alike(self, count: int, uneven: Sequence[PerRank]) -> tuple[int, ...]:
        """Kinds of ranks: of one kind do the same, send over equal links to one kind, and receive from one
        kind. The ``count`` first ranks are looked at, all others are as they."""
        ways = [[rank % count for rank in peers] for way in (self.to, self.source) for peers in way.values()]
        kinds, number = _named(zip([0] * count, *uneven, strict=True))
        while True:
            before = number
            looks = zip(
                kinds, *self.sends.values(), *([kinds[rank] for rank in way] for way in ways), strict=True
            )
            kinds, number = _named(looks)
            if number == before:
                return tuple(kinds) * (self.placement.ranks // count)


def _named(looks: Iterable[object]) -> tuple[list[int], int]:
    """Numbers that are equal where looks are, and how many there are."""
    names: dict[object, int] = {}
    return [names.setdefault(look, len(names)) for look in looks], len(names)


def _uneven(script: Script) -> list[PerRank]:
    """What ranks do not have in common, each once: times of kernels, and whether they send."""
    found: dict[PerRank, None] = {}
    for entry in script.entries:
        if isinstance(entry, Kernel) and isinstance(entry.us, tuple):
            found[entry.us] = None
        elif isinstance(entry, Exchange) and entry.sends is not None:
            found[entry.sends] = None
    return list(found)


def run(script: Script, topology: Topology, *, record: bool = False, every_rank: bool = False) -> Timeline:
    """Emulate a pass; ``record`` keeps what happened when, ``every_rank`` follows each of them."""
    return _Run(script, Fabric(script, topology, every_rank=every_rank), record).run()


class _Stream:
    """Exchanges of the axes inside a node, or of the others."""

    def __init__(self, lane: str, size: int, link: Link | None) -> None:
        self.lane = lane
        self.free = [0.0] * size
        self.sm_share = 0.0 if link is None else link.sm_share
        self.copies = link is not None and link.copy_engines
        # Both directions of an exchange end together, and need both ends' streams.
        self.paired = lane == "net" and not self.copies


class _Run:
    def __init__(self, script: Script, fabric: Fabric, record: bool) -> None:
        self.script = script
        self.fabric = fabric
        self.record = record
        self.size = len(fabric.ranks)
        topology, kind = fabric.topology, fabric.kind
        self.now = [0.0] * self.size
        self.busy = [0.0] * self.size
        self.host = 0.0
        self.port_out = [0.0] * self.size
        self.port_in = [0.0] * self.size
        node = _Stream("node", self.size, topology.inside)
        net = _Stream("net", self.size, topology.between)
        inside = fabric.placement.inside_axes
        self.stream = {key: node if key[0] in inside else net for key in fabric.keys}
        self.to = {key: [kind[fabric.to[key][rank]] for rank in fabric.ranks] for key in fabric.keys}
        self.source = {key: [kind[fabric.source[key][rank]] for rank in fabric.ranks] for key in fabric.keys}
        self.link = {key: [fabric.sends[key][rank] for rank in fabric.ranks] for key in fabric.keys}
        self.staying = {
            key: [rank for rank, sends in enumerate(self.link[key]) if not sends.crosses]
            for key in fabric.keys
        }
        self.done: dict[int, list[float]] = {}  # by exchange: when both halves have ended, on each rank
        self.copied: dict[int, tuple[_Stream, list[float]]] = {}  # and when it came, by copy engines
        self.freed: dict[Slot, list[float]] = {}
        self.crowding: dict[int, _Stream] = {}
        self.events: list[Event] = []

    def run(self) -> Timeline:
        for entry in self.script.entries:
            if isinstance(entry, Kernel):
                self._kernel(entry)
            elif isinstance(entry, Exchange):
                self._exchange(entry)
            elif isinstance(entry, Wait):
                self._wait(entry)
            else:
                self.freed[entry.slot] = self.now
        assert not self.done, f"exchanges {sorted(self.done)} are never waited for"
        return Timeline(
            script=self.script,
            kind=self.fabric.kind,
            total_us=max(self.now),
            end_us=tuple(self.now),
            compute_us=tuple(self.busy),
            events=tuple(self.events),
        )

    def _of_kinds(self, of_ranks: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(of_ranks[rank] for rank in self.fabric.ranks)

    def _kernel(self, entry: Kernel) -> None:
        self.host += self.fabric.topology.start_us
        us = self._of_kinds(entry.us) if isinstance(entry.us, tuple) else (entry.us,) * self.size
        taken = max((stream.sm_share for stream in self.crowding.values()), default=0.0)
        if taken and not entry.steady:
            left = [self._left(rank) for rank in range(self.size)]
            if self.script.room == "all along":
                us = tuple(each / (1 - taken) for each in us)
            elif self.script.room == "at first":
                us = tuple(k and max(k + LONGER * taken * x, x) for k, x in zip(us, left, strict=True))
            else:
                us = tuple(k and k + x for k, x in zip(us, left, strict=True))
        host = self.host
        if self.record:
            for rank, (now, each) in enumerate(zip(self.now, us, strict=True)):
                if each:
                    begin, name = max(now, host), entry.name
                    self.events.append(Event(self.fabric.ranks[rank], "compute", name, begin, begin + each))
        self.now = [
            (now if now > host else host) + each if each else now
            for now, each in zip(self.now, us, strict=True)
        ]
        self.busy = [busy + each for busy, each in zip(self.busy, us, strict=True)]

    def _exchange(self, entry: Exchange) -> None:
        self.host += self.fabric.topology.start_us
        key = entry.axis, entry.offset
        stream, source, link = self.stream[key], self.source[key], self.link[key]
        free, port_out, port_in, host = stream.free, self.port_out, self.port_in, self.host
        ready = [now if now > host else host for now in self.now]
        if stream.copies:
            if not entry.made:
                ready = [host] * self.size
            freed = None if entry.slot is None else self.freed.pop(entry.slot, None)
            ready = _later(_later(ready, free), freed or free)
        ends = [0.0] * self.size  # of what each rank sends
        sends = None if entry.sends is None else self._of_kinds(entry.sends)
        for rank, peer in enumerate(self.to[key]):
            if sends is not None and not sends[rank]:
                continue
            begin = max(ready[rank], ready[peer], free[rank], free[peer] if stream.paired else 0.0)
            us_per_byte, latency, crosses = link[rank]
            if not crosses:
                begin = max(begin, port_out[rank], port_in[peer])
            ends[rank] = begin + (0.0 if entry.behind else latency) + entry.num_bytes * us_per_byte
            if self.record:
                self.events.append(
                    Event(
                        self.fabric.ranks[rank], stream.lane, entry.name, begin, ends[rank],
                        entry.num_bytes, self.fabric.to[key][self.fabric.ranks[rank]],
                    )
                )  # fmt: skip
        arrivals = [ends[rank] for rank in source]
        done = _later(ends, arrivals)
        stream.free = _later(free, done if stream.paired else ends)
        for rank in self.staying[key]:
            if end := ends[rank]:
                port_out[rank] = port_in[self.to[key][rank]] = end
        self.done[entry.number] = done
        if stream.copies:
            self.copied[entry.number] = stream, arrivals
        if stream.sm_share:
            self.crowding[entry.number] = stream

    def _wait(self, entry: Wait) -> None:
        done = self.done.pop(entry.number)
        if entry.number in self.copied:  # who receives waits for all that the stream had to do before
            stream, arrivals = self.copied.pop(entry.number)
            stream.free = _later(stream.free, arrivals)
            done = [
                free if came else end for free, came, end in zip(stream.free, arrivals, done, strict=True)
            ]
        self.now = _later(self.now, done)
        self.crowding.pop(entry.number, None)

    def _left(self, rank: int) -> float:
        """Time until the exchanges of a rank have ended that take multiprocessors."""
        ends = (self.done[number][rank] for number, stream in self.crowding.items() if stream.sm_share)
        return max(0.0, max(ends) - max(self.now[rank], self.host))


def _later(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one if one > other else other for one, other in zip(some, others, strict=True)]
