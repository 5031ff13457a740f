"""Which ranks share a host whose GPUs can write into each other's memory, found out by all ranks together.

All ranks say where they are; where several are on one host they try it: they share a small allocation, write
into each other's part, and tell each other whether it arrived. Only if it did everywhere is it used, so that
no rank waits for one that could not. Nothing here uses the data channel.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import Store  # type: ignore[attr-defined]

from meshattn.transport.base import TransportError
from meshattn.transport.cuda_driver import CudaStreamOps
from meshattn.transport.exchange import CopyEngine, Region

SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_WORD = 4


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    host: str
    boot: str
    gpu: str | None  # identity of its current device; None if it has none in use
    shares: bool  # whether other ranks may be on the same GPU

    @property
    def node(self) -> tuple[str, str]:
        return self.host, self.boot


class Roll:
    """Lets the ranks of a mesh tell each other short texts.

    Args:
        store: key-value store of these ranks alone.
        rank: this rank.
        size: number of ranks.
        timeout: seconds to wait for the others.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timedelta(seconds=timeout)
        self._round = 0

    def call(self, text: str) -> list[str]:
        """The texts of all ranks, in rank order. Collective."""
        self._round += 1
        self._store.set(f"roll/{self._round}/{self._rank}", text)
        keys = [f"roll/{self._round}/{rank}" for rank in range(self._size)]
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as error:
            seconds = self._timeout.total_seconds()
            raise TransportError(f"not all ranks of the mesh answered within {seconds:g} s") from error
        texts = [answer.decode() for answer in self._store.multi_get(keys)]
        if self._round > 1:  # everybody has read the round before
            self._store.delete_key(f"roll/{self._round - 1}/{self._rank}")
        return texts

    def first(self, text: str) -> str:
        """The first text of a rank that has one; "" if none has. Collective."""
        return next((f"rank {rank}: {said}" for rank, said in enumerate(self.call(text)) if said), "")


def place_here(device: torch.device | None) -> Place:
    """Where this rank runs; ``device`` is its CUDA device, if it uses one."""
    gpu = None if device is None else str(torch.cuda.get_device_properties(device).uuid)
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return Place(socket.gethostname(), boot, gpu, os.environ.get(SHARED_GPU) == "1")


def gather_places(roll: Roll, place: Place) -> list[Place]:
    """The places of all ranks, in rank order. Collective."""
    return [Place(**json.loads(text)) for text in roll.call(json.dumps(asdict(place)))]


def nodes_of(places: Sequence[Place]) -> tuple[int, ...]:
    """Number of the host of every rank, counted in order of appearance."""
    numbers: dict[tuple[str, str], int] = {}
    return tuple(numbers.setdefault(place.node, len(numbers)) for place in places)


def sharers(places: Sequence[Place], rank: int) -> int:
    """How many ranks use the GPU of this one, itself included; 1 without a GPU. GPUs have names of their own,
    whatever a host calls itself."""
    mine = places[rank].gpu
    return 1 if mine is None else sum(place.gpu == mine for place in places)


def obstacle(places: Sequence[Place]) -> str:
    """Why copy engines cannot connect any two of these ranks, as far as the places tell; "" if they may."""
    without = [rank for rank, place in enumerate(places) if place.gpu is None]
    if without:
        return f"rank {without[0]} had no CUDA device in use when the mesh was built"
    if len(set(nodes_of(places))) == len(places):
        return "every rank is on a host of its own"
    devices = [(place.node, place.gpu) for place in places]
    if len(set(devices)) < len(devices) and not all(place.shares for place in places):
        return f"several ranks share a GPU, which {SHARED_GPU}=1 would allow"
    return ""


@dataclass(frozen=True)
class Fleet:
    """The ranks of this rank's host and their process group."""

    members: tuple[int, ...]  # mesh ranks, in the order of the group
    group: dist.ProcessGroup

    def allocate(self, device: torch.device, nbytes: int) -> Region:
        """Zeroed symmetric memory. Collective over the members."""
        local = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        local.zero_()
        torch.cuda.synchronize(device)  # nobody can write here before the rendezvous below
        return self._meet(local)

    def _meet(self, local: Tensor) -> Region:
        handle = symmetric_memory.rendezvous(local, self.group)
        if handle is None:
            raise RuntimeError("torch gave no symmetric memory")
        addresses = list(handle.buffer_ptrs)
        offset = local.data_ptr() - addresses[handle.rank]
        return Region(
            local, {rank: addresses[n] + offset for n, rank in enumerate(self.members)}, (local, handle)
        )


def try_copy_engines(
    roll: Roll,
    fleet: Fleet | None,
    rank: int,
    names: Sequence[int],
    device: torch.device,
    timeout: float,
) -> tuple[CopyEngine | None, str]:
    """Connect the copy engines of this host and try them, or say why not, on all ranks alike. Collective.

    Args:
        fleet: the ranks of this host; None where this rank is alone on its own.

    Returns:
        the engine, None for a rank alone on its host, and why there is none on any rank, "" if there is.
    """
    ops: CudaStreamOps | None = None
    problem = ""
    try:
        ops = CudaStreamOps(device)
    except Exception as error:
        problem = str(error)
    if found := roll.first(problem):
        return None, found
    assert ops is not None
    region: Region | None = None
    try:
        region = None if fleet is None else fleet.allocate(device, _WORD * len(names))
        if region is not None:
            source = torch.arange(1, len(names) + 1, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)
            for address in region.addresses.values():
                place = address + _WORD * rank
                ops.copy(ops.comm_stream, place, source.data_ptr() + _WORD * rank, _WORD)
                ops.write(ops.comm_stream, place, rank + 1)
            ops.synchronize()
    except Exception as error:
        problem = str(error).strip().splitlines()[0]
    if found := roll.first(problem):
        return None, found
    if region is not None:
        words = region.local.view(torch.int32).tolist()
        missing = [peer for peer in region.addresses if words[peer] != peer + 1]
        problem = f"nothing arrives from rank {missing[0]}" if missing else ""
    if found := roll.first(problem):
        return None, found
    if fleet is None:
        return None, ""
    here = fleet
    return CopyEngine(ops, lambda nbytes: here.allocate(device, nbytes), rank, names, timeout), ""
