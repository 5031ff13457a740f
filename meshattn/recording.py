"""Passes that recur on the same memory run as CUDA graphs: one launch in place of some dozens.

A short pass takes less time on the GPU than Python takes to enqueue it. In training the allocator gives the
tensors of a layer the same memory in every step, so what its passes enqueue recurs, and is recorded the third
time. A graph knows memory alone: it serves whatever tensors lie there now. Everything that a pass is given or
fills is found again by its key; what a kernel needs beside that is scratch in a pool of the recorder.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch

from meshattn.transport.base import Counts, Traffic, Transport, TransportError
from meshattn.transport.cuda_driver import DeviceMemory
from meshattn_kernels.keeping import keeping

if TYPE_CHECKING:
    from meshattn.program import Program

_EAGER_RUNS = 2  # of what recurs, before it is recorded: by then all its kernels are compiled
_KEPT = 256  # memories of one program that are known at a time; a model has one a layer
_ROOM = 2**28  # bytes of the device that must be free: PyTorch gives nothing back while it records


class Work(Protocol):
    """The tensors of one pass. When it has been executed, all that comes of it is in them."""

    def memory(self) -> Hashable:
        """Where all that it is given and fills lies."""
        ...

    def moved(self) -> Sequence[int]:
        """Addresses in memory of PyTorch's that exchanges read or write."""
        ...


class Graph(Protocol):
    """Operations that can be launched again and again."""

    def replay(self) -> None:
        """Run them on the current stream."""
        ...


class Streams(Protocol):
    """What a recorder needs of a device."""

    def capturing(self) -> bool:
        """Whether what is enqueued now goes into a graph of somebody else."""
        ...

    def current(self) -> int: ...

    def wait(self, stream: int) -> None:
        """The current stream comes after all that is on another."""
        ...

    def recorded(self, execute: Callable[[], None]) -> Graph:
        """What `execute` enqueues, as a graph; nothing of it runs."""
        ...

    def number(self, address: int) -> int:
        """Of the allocation that lies there now."""
        ...

    def is_known(self, address: int) -> bool:
        """Whether its number tells of all that happens to it."""
        ...

    def free_bytes(self) -> int:
        """What the device has left."""
        ...


@dataclass(frozen=True)
class _Recording:
    graph: Graph
    exchanges: tuple[tuple[Transport, Any], ...]  # what each transport keeps of them
    counts: Counts  # of what they move
    kept: list[object]  # tables that kernels read


@dataclass
class _Known:
    runs: int = 0
    tables: list[object] = field(default_factory=list)  # of the last run: what records it can make none
    recording: _Recording | None = None


class Recorder:
    """The recordings of one mesh on one device.

    Args:
        traffic: what the transports of the mesh count.
        streams: of the device.
    """

    def __init__(self, traffic: Traffic, streams: Streams) -> None:
        self._traffic = traffic
        self._streams = streams
        # Programs, and the tables of their kernels, go with the sequence that they belong to.
        self._known: WeakKeyDictionary[Program, OrderedDict[Hashable, _Known]] = WeakKeyDictionary()
        self._last: int | None = None  # stream of the last replay
        _alive.add(self)

    @property
    def recordings(self) -> int:
        """How many passes are recorded."""
        every = (known for table in self._known.values() for known in table.values())
        return sum(known.recording is not None for known in every)

    def run(self, program: Program, work: Work, execute: Callable[[], None]) -> None:
        """Execute a pass, or do again what it did on the same memory."""
        if self._streams.capturing():  # it goes into a graph of the user's
            return execute()
        transports = program.moving
        for transport in transports:
            transport.check()  # here: an error keeps what is at hand, and NCCL waits for the end of graphs
        # Kernels take what lies at an address. Copies and NCCL know the allocation itself, in whose place
        # PyTorch may get another one at the same address.
        moved = work.moved()
        places = [self._streams.number(address) for address in moved]
        known = self._entry(program, (work.memory(), *places, *[x.generation for x in transports]))
        if known.recording is None:
            known.runs += 1
            may_record = known.runs > _EAGER_RUNS and all(map(self._streams.is_known, moved))
            if not may_record or self._streams.free_bytes() < _ROOM:
                with keeping() as known.tables:
                    return execute()
            known.recording = self._record(transports, execute)
            known.tables = []
        recording = known.recording
        self._come_after_others()
        replays = [transport.replay(exchanges) for transport, exchanges in recording.exchanges]
        recording.graph.replay()
        for replay in replays:
            replay.enqueued()
        self._traffic.add(recording.counts)

    def _entry(self, program: Program, key: Hashable) -> _Known:
        table = self._known.setdefault(program, OrderedDict())
        known = table.get(key)
        if known is None:
            known = table[key] = _Known()
            if len(table) > _KEPT:
                table.popitem(last=False)
        else:
            table.move_to_end(key)
        return known

    def _come_after_others(self) -> None:
        """All graphs use the same scratch, and belong on one stream."""
        stream = self._streams.current()
        if self._last not in (None, stream):
            self._streams.wait(self._last)
        self._last = stream

    def _record(self, transports: tuple[Transport, ...], execute: Callable[[], None]) -> _Recording:
        before = self._traffic.counts()
        for transport in transports:
            transport.record(self.clear)
        try:
            with keeping() as kept:
                graph = self._streams.recorded(execute)
        except RuntimeError as error:
            if isinstance(error, (TransportError, torch.OutOfMemoryError)):
                raise
            for transport in transports:
                transport.check()  # a failed exchange may be why
            raise RuntimeError(
                f"a pass could not be recorded as a CUDA graph ({error}): build the mesh with "
                "cuda_graphs=False"
            ) from error
        finally:  # what comes next goes into no graph, also after a failure
            exchanges = tuple((transport, transport.recorded()) for transport in transports)
        return _Recording(graph, exchanges, self._traffic.take_back(before), kept)

    def clear(self) -> None:
        """Forget all, before what they use is given back. NCCL waits for the end of graphs that know it."""
        self._known = WeakKeyDictionary()


_alive: WeakSet[Recorder] = WeakSet()


@atexit.register
def _forget_all() -> None:
    """NCCL would wait for the end of graphs when the process ends, too."""
    for recorder in list(_alive):
        recorder.clear()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """It may find memory that other ranks have mapped, of a mesh that was dropped, which no capture allows to
    be given back."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaStreams:
    """`Streams` of a CUDA device, which is the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside: Any = None
        self._pool: Any = None  # scratch of all graphs
        self._graphs: WeakSet[Any] = WeakSet()  # that use it

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def current(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self._device.index))

    def wait(self, stream: int) -> None:
        other: Any = torch.cuda.ExternalStream
        torch.cuda.current_stream(self._device).wait_stream(other(stream, self._device))

    @cached_property
    def _memory(self) -> DeviceMemory:
        return DeviceMemory()

    def number(self, address: int) -> int:
        return self._memory.number(address)

    def is_known(self, address: int) -> bool:
        return self._memory.is_from_malloc(address)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def recorded(self, execute: Callable[[], None]) -> Graph:
        if self._beside is None:
            stream: Any = torch.cuda.Stream
            self._beside = stream(self._device)
        alive = list(self._graphs)  # which another thread may drop, but not before this one shares their pool
        if not alive:  # PyTorch refuses a pool whose graphs are all gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._beside), _without_garbage_collection():
            # Other threads may allocate and wait meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            del alive
            try:
                execute()
            except BaseException:
                self._graphs = WeakSet()  # the allocator may not let go of the pool of a broken capture
                with contextlib.suppress(RuntimeError):  # it only says that the capture is broken
                    graph.capture_end()
                    graph.reset()
                raise
            graph.capture_end()
        self._graphs.add(graph)
        return graph
