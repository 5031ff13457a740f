"""From what a user calls a group to a connection between its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from meshattn.transport.base import Transport, TransportError
from meshattn.transport.exchange import CopyEngine
from meshattn.transport.groups import end_group, global_ranks, new_group, store_of
from meshattn.transport.hosts import (
    Fleet,
    Place,
    Roll,
    gather_places,
    nodes_of,
    obstacle,
    place_here,
    sharers,
    try_copy_engines,
)
from meshattn.transport.p2p import P2PTransport
from meshattn.transport.patience import within
from meshattn.transport.symmetric import SymmetricTransport
from meshattn.transport.threads import SimulatedGroup, ThreadTransport

Group = dist.ProcessGroup | DeviceMesh | SimulatedGroup | Sequence[int]
TRANSPORTS = ("auto", "symmetric", "p2p")
"""Of process groups."""
_PATIENCE = 5.0  # seconds for ranks to say that they have connected to this one


@dataclass(frozen=True)
class Connection:
    """The ranks of one mesh as one of them sees them: 0 to size - 1 in mesh order."""

    rank: int
    size: int
    names: tuple[int, ...]  # what each mesh rank is called outside: its global rank
    transport: Transport  # serves every pair of ranks
    store: Store
    reason: str  # why this transport, or why copy engines
    timeout: float
    choice: str = "auto"
    sharers: int = 1  # ranks of the mesh on this rank's GPU, itself included
    nodes: tuple[int, ...] = ()  # host of every rank, where copy engines connect the ranks of a host
    engine: CopyEngine | None = None
    device: torch.device | None = None  # that the engine serves
    copying: SymmetricTransport | None = None  # serves ranks of one host
    host_group: dist.ProcessGroup | None = None  # of the ranks of this host, where they are not all

    @property
    def name(self) -> int:
        """Global rank of this rank."""
        return self.names[self.rank]

    def check_device(self, device: torch.device) -> None:
        """ValueError for tensors of a device that the chosen transport does not serve."""
        if self.choice == "symmetric" and self.size > 1 and device.type != "cuda":
            raise ValueError(
                f"the tensors are on {device}, but transport='symmetric' moves memory of CUDA devices: "
                "build the mesh with transport='auto'"
            )
        if self.nodes and device.type == "cuda" and device != self.device:
            raise ValueError(
                f"the tensors are on {device}, but {self.device} was the current device when the mesh was "
                "built: call torch.cuda.set_device before init_attention_mesh"
            )

    def along(self, ring: tuple[int, ...], device: torch.device) -> Transport:
        """The transport of an axis whose ranks form the cycles i -> ``ring[i]``, on a device."""
        if device.type != "cuda" or not self.inside(ring):
            return self.transport
        assert self.copying is not None
        return self.copying

    def inside(self, ring: Sequence[int]) -> bool:
        """Whether copy engines serve an axis: something moves there, and never from host to host."""
        moves = any(peer != rank for rank, peer in enumerate(ring))
        return moves and bool(self.nodes) and all(self.nodes[a] == self.nodes[b] for a, b in enumerate(ring))

    def check(self) -> None:
        """TransportError if an exchange is known to have failed."""
        self.transport.check()
        if self.engine is not None:
            self.engine.watch.check()

    def close(self) -> Connection:
        """Give back everything; what is left has words for it alone. Collective."""
        healthy = self.engine is None or self.engine.finish()
        if self.nodes and healthy:
            with contextlib.suppress(TransportError):  # a rank that is gone does not hold up the others
                Roll(PrefixStore("close", self.store), self.rank, self.size, self.timeout).call("")
        if self.engine is not None:
            self.engine.close()
        if self.copying is not None:
            self.copying.close()
        if self.host_group is not None:
            end_group(self.host_group)
        self.transport.close()
        return replace(self, engine=None, copying=None, host_group=None)

    def abandon(self) -> None:
        """Give it back before it has served, unless a rank that may not have come so far would find nobody to
        connect to; that one goes with all groups."""
        if not isinstance(self.transport, P2PTransport):
            return
        roll = Roll(PrefixStore("abandon", self.store), self.rank, self.size, min(self.timeout, _PATIENCE))
        with contextlib.suppress(TransportError, TimeoutError, RuntimeError):
            within(2 * _PATIENCE, lambda: roll.call(""))
            self.transport.close()


def check_transport(transport: str, group: Group | None) -> None:
    """ValueError for an unknown transport and for one that cannot serve this kind of group."""
    simulated = isinstance(group, SimulatedGroup)
    if transport not in (*TRANSPORTS, "threads"):
        choices = "auto or threads, as the group is simulated"
        if not simulated:
            choices = (
                f"one of {', '.join(TRANSPORTS)}; p2p is the send and receive of torch.distributed, by NCCL "
                "or gloo"
            )
        raise ValueError(f"transport={transport!r} is unknown: choose {choices}")
    if transport == "threads" and not simulated:
        raise ValueError(
            "transport='threads' needs a simulated group (meshattn.testing.run_ranks); "
            "for a process group use 'p2p'"
        )
    if transport in ("p2p", "symmetric") and simulated:
        raise ValueError(
            f"transport={transport!r} needs a process group; a simulated group has transport='threads'"
        )


def connect(group: Group | None, timeout: float) -> Connection:
    """Open a connection of its own between the ranks of `group`. Collective, and inside that group only."""
    if isinstance(group, SimulatedGroup):
        return _simulated(group, timeout)
    ranks = global_ranks(group)
    data = new_group(tuple(sorted(ranks)), timedelta(seconds=timeout))
    return Connection(
        rank=ranks.index(dist.get_rank()),
        size=len(ranks),
        names=ranks,
        transport=P2PTransport(data, [dist.get_group_rank(data, rank) for rank in ranks], ranks, timeout),
        store=PrefixStore("meshattn", store_of(data)),
        reason="not chosen yet",
        timeout=timeout,
    )


def choose(connection: Connection, transport: str) -> Connection:
    """The same connection with copy engines where they serve, or with the reason why not. Collective.

    Args:
        transport: "auto", or what the user insists on.

    Raises:
        ValueError: on every rank alike, if ``transport`` is "symmetric" and copy engines cannot serve.
    """
    if isinstance(connection.transport, ThreadTransport):
        return connection
    assert isinstance(connection.transport, P2PTransport)
    if connection.size == 1:
        return replace(connection, choice=transport, reason="a single rank has nothing to send")
    roll = Roll(PrefixStore("choice", connection.store), connection.rank, connection.size, connection.timeout)
    nccl = connection.transport.uses_nccl
    device = _device_in_use(asked_for=nccl or transport == "symmetric")
    places = gather_places(roll, place_here(device))
    if transport == "p2p":
        chosen = replace(connection, choice=transport, reason="as asked for")
    else:
        chosen = _with_engines(connection, transport, roll, places, device)
    gpus = {(place.node, place.gpu) for place in places if place.gpu is not None}
    apart = len(gpus) == len(places)
    if nccl and device is not None and apart and len(set(chosen.nodes)) != 1:
        connection.transport.warm_up(device)
    return replace(chosen, sharers=sharers(places, connection.rank))


def _device_in_use(asked_for: bool) -> torch.device | None:
    """The device of the default group, else the current CUDA device if somebody uses it or asks for it."""
    everybody = dist.group.WORLD
    if everybody is not None and everybody.bound_device_id is not None:
        return everybody.bound_device_id if everybody.bound_device_id.type == "cuda" else None
    try:
        touched: Any = torch.cuda.is_initialized
        if torch.cuda.is_available() and (asked_for or touched()):
            return torch.device("cuda", torch.cuda.current_device())
    except RuntimeError:  # in a forked process, say: it has no device, and must tell the others so
        pass
    return None


def _with_engines(
    connection: Connection, transport: str, roll: Roll, places: Sequence[Place], device: torch.device | None
) -> Connection:
    assert isinstance(connection.transport, P2PTransport)
    nodes, why = nodes_of(places), obstacle(places)
    if not why and transport == "symmetric" and len(set(nodes)) > 1:
        why = f"the mesh spans {len(set(nodes))} hosts; transport='auto' uses copy engines inside each"
    engine: CopyEngine | None = None
    fleet: Fleet | None = None
    if not why:
        assert device is not None
        fleet = _fleet(connection, nodes)
        engine, why = try_copy_engines(
            roll, fleet, connection.rank, connection.names, device, connection.timeout
        )
    if why and fleet is not None and fleet.group is not connection.transport.group:
        end_group(fleet.group)
    if why and transport == "symmetric":
        raise ValueError(f"transport='symmetric' cannot serve this mesh: {why}")
    if why:
        return replace(connection, choice=transport, reason=f"no copy engines: {why}")
    hosts = len(set(nodes))
    reason = "all ranks share a host" if hosts == 1 else f"the ranks are on {hosts} hosts"
    whole, copying = connection.transport, None
    if engine is not None:
        copying = SymmetricTransport(engine, whole, whole.traffic)
    return replace(
        connection,
        choice=transport,
        reason=reason,
        nodes=nodes,
        engine=engine,
        device=device,
        copying=copying,
        host_group=fleet.group if fleet is not None and fleet.group is not whole.group else None,
    )


def _fleet(connection: Connection, nodes: Sequence[int]) -> Fleet | None:
    """The ranks of this rank's host, with a group of their own if they are not all."""
    mine = [rank for rank in range(connection.size) if nodes[rank] == nodes[connection.rank]]
    if len(mine) == 1:
        return None
    mine.sort(key=lambda rank: connection.names[rank])  # as process groups count
    assert isinstance(connection.transport, P2PTransport)
    group = connection.transport.group
    if len(mine) < connection.size:
        group = new_group(
            tuple(connection.names[rank] for rank in mine), timedelta(seconds=connection.timeout)
        )
    return Fleet(tuple(mine), group)


def _simulated(group: SimulatedGroup, timeout: float) -> Connection:
    opened = group.next_connection()
    return Connection(
        rank=group.rank,
        size=group.size,
        names=tuple(range(group.size)),
        transport=ThreadTransport(group, opened, timeout),
        store=PrefixStore(f"meshattn/{opened}", group.world.store),
        reason="the group is simulated in one process",
        timeout=timeout,
    )
