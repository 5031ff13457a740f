"""Streams, events and symmetric memory on the CPU: what the copy-engine transport asks of a GPU.

`Shuffled` enqueues everything and lets a test run the heads of all queues of all ranks in a random order, so
that a missing or misplaced flag shows as wrong bytes or as a standstill. `Threaded` runs the current stream
in the calling thread and the others in threads of their own, so that the engine computes with real numbers.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps

import torch

from meshattn.transport.exchange import Region

COMPUTE, COMM, IN_GRAPH = 11, 12, 13


def read_word(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


def _write_word(address: int, value: int) -> None:
    ctypes.c_uint32.from_address(address).value = value


class SharedMemory:
    """One allocation a rank; every rank asks for the same sizes in the same order."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._counts = [0] * ranks
        self._made: list[list[torch.Tensor]] = []
        self.sizes: list[int] = []

    def allocate(self, rank: int, nbytes: int) -> Region:
        with self._lock:
            number = self._counts[rank]
            self._counts[rank] += 1
            if number == len(self._made):
                self._made.append([torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self._ranks)])
                self.sizes.append(nbytes)
            made = self._made[number]
        assert made[rank].numel() == nbytes, "the ranks ask for different sizes"
        return Region(made[rank], {peer: tensor.data_ptr() for peer, tensor in enumerate(made)})


@dataclass
class Op:
    """What is at the head of a queue: it runs once it can."""

    run: Callable[[], object]
    can: Callable[[], bool] = lambda: True
    name: str = ""


@dataclass
class World:
    """The queues of all ranks, run in a random order."""

    seed: int
    queues: dict[tuple[int, int], deque[Op]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def enqueue(self, key: tuple[int, int], op: Op) -> None:
        self.queues.setdefault(key, deque()).append(op)

    def run(self, steps: int | None = None) -> bool:
        """Run until everything is done, or as many operations; False if nothing can go on."""
        while steps is None or steps > 0:
            pending = [q for q in self.queues.values() if q]
            able = [q for q in pending if q[0].can()]
            if not pending:
                return True
            if not able:
                return False
            self._random.choice(able).popleft().run()
            steps = None if steps is None else steps - 1
        return True


def _recordable(method: Callable[..., None]) -> Callable[..., None]:
    """On a tape while there is one; in the queues when the tape is played."""

    @wraps(method)
    def put(self: Shuffled, *args: object) -> None:
        if self.tape is None:
            method(self, *args)
        else:
            self.tape.append((method, args))

    return put


@dataclass(frozen=True)
class Tape:
    """What a rank would have enqueued: a graph of its operations."""

    ops: Shuffled
    recorded: list[tuple[Callable[..., None], tuple[object, ...]]]

    @property
    def is_joined(self) -> bool:
        """Whether all on the communication stream is waited for by another, as CUDA demands of a graph."""
        last, recorded, joined = 0, dict[object, int](), 0
        for number, (method, args) in enumerate(self.recorded, 1):
            name = method.__name__
            if name == "record" and args[1] == COMM:
                recorded[args[0]] = last
            elif name == "wait_event" and args[0] != COMM:
                joined = max(joined, recorded.get(args[1], 0))
            elif COMM in args[:1]:
                last = number
        return joined == last

    def replay(self) -> None:
        # Events of a graph are its own: outside they may mean something else by now. So are its branches,
        # which do not come behind what is on the stream that they were recorded on.
        outside, self.ops.events = self.ops.events, [[True] for _ in self.ops.events]
        for method, args in self.recorded:
            at = 1 if method.__name__ == "record" else 0
            method(self.ops, *args[:at], IN_GRAPH if args[at] == COMM else args[at], *args[at + 1 :])
        self.ops.events = outside


class Shuffled:
    """Operations of one rank, enqueued in a `World`; with ``one_queue`` all streams share one, in order."""

    comm_stream = COMM

    def __init__(self, world: World, rank: int, *, one_queue: bool = False) -> None:
        self._world = world
        self._rank = rank
        self._one_queue = one_queue
        self.events: list[list[bool]] = []
        self.stream = COMPUTE
        self.in_capture = False
        self.tape: list[tuple[Callable[..., None], tuple[object, ...]]] | None = None

    def record_tape(self, run: Callable[[], None]) -> Tape:
        """What ``run`` would enqueue."""
        self.tape, self.in_capture = [], True
        run()
        tape, self.tape, self.in_capture = Tape(self, self.tape), None, False
        assert tape.is_joined, "capturing stream has unjoined work"
        return tape

    @_recordable
    def enqueue(self, stream: int, op: Op) -> None:
        self._world.enqueue((self._rank, 0 if self._one_queue else stream), op)

    def host_word(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32)

    def current_stream(self) -> int:
        return self.stream

    def capturing(self) -> bool:
        return self.in_capture

    @_recordable
    def write(self, stream: int, address: int, value: int) -> None:
        self.enqueue(stream, Op(lambda: _write_word(address, value), name="write"))

    @_recordable
    def wait(self, stream: int, address: int, value: int) -> None:
        self.enqueue(stream, Op(lambda: None, lambda: read_word(address) == value, "wait"))

    @_recordable
    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        # In pieces, so that others run while a copy is half done.
        half = nbytes // 2
        for begin, size in ((0, half), (half, nbytes - half)):
            self.enqueue(
                stream, Op(lambda b=begin, n=size: ctypes.memmove(to + b, source + b, n), name="copy")
            )

    def rescue_word(self, address: int, value: int) -> None:
        _write_word(address, value)

    def rescue_fill(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 255, nbytes)

    def new_event(self) -> int:
        self.events.append([True])
        return len(self.events)

    @_recordable
    def record(self, event: int, stream: int) -> None:
        token = [False]
        self.events[event - 1] = token
        self.enqueue(stream, Op(lambda: token.__setitem__(0, True), name="record"))

    @_recordable
    def wait_event(self, stream: int, event: int) -> None:
        token = self.events[event - 1]
        self.enqueue(stream, Op(lambda: None, lambda: token[0], "wait event"))

    def is_done(self, event: int) -> bool:
        return self.events[event - 1][0]

    def enter_thread(self) -> None:
        pass

    def synchronize(self) -> None:
        assert self._world.run(), "standstill"


class Threaded:
    """Operations of one rank, run at once on the current stream and by a thread on each of the others."""

    comm_stream = COMM

    def __init__(self, seed: int, longest_delay: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._longest_delay = longest_delay
        self._events: list[threading.Event] = []
        self._queues: dict[int, queue.SimpleQueue[Callable[[], object]]] = {}
        self._queues[COMM] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(self._queues[COMM],), daemon=True).start()

    def _work(self, tasks: queue.SimpleQueue[Callable[[], object]]) -> None:
        while True:
            tasks.get()()

    def _put(self, stream: int, task: Callable[[], object]) -> None:
        if stream in self._queues:
            self._queues[stream].put(task)
        else:
            task()

    def host_word(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32)

    def current_stream(self) -> int:
        return COMPUTE

    def capturing(self) -> bool:
        return False

    def write(self, stream: int, address: int, value: int) -> None:
        self._put(stream, lambda: _write_word(address, value))

    def wait(self, stream: int, address: int, value: int) -> None:
        def run() -> None:
            while read_word(address) != value:
                time.sleep(0.0002)

        self._put(stream, run)

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        delay = self._random.random() * self._longest_delay

        def run() -> None:
            time.sleep(delay)
            ctypes.memmove(to, source, nbytes)

        self._put(stream, run)

    def rescue_word(self, address: int, value: int) -> None:
        _write_word(address, value)

    def rescue_fill(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 255, nbytes)

    def new_event(self) -> int:
        self._events.append(threading.Event())
        return len(self._events)

    def record(self, event: int, stream: int) -> None:
        token = self._events[event - 1] = threading.Event()
        self._put(stream, token.set)

    def wait_event(self, stream: int, event: int) -> None:
        token = self._events[event - 1]
        self._put(stream, lambda: token.wait())

    def is_done(self, event: int) -> bool:
        return self._events[event - 1].is_set()

    def enter_thread(self) -> None:
        pass

    def synchronize(self) -> None:
        token = threading.Event()
        self._put(COMM, token.set)
        token.wait()
