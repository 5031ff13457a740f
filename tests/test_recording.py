"""Passes that recur are recorded and played; all others run as they are."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from meshattn.program import Program
from meshattn.recording import CudaStreams, Recorder
from meshattn.transport.base import Message, Traffic, Transport, TransportError
from meshattn_kernels.keeping import keep

BYTES = torch.zeros(24, dtype=torch.uint8)
SENT = Message("forward", "col", "inward", "forward step 0/1, kv #1", 1, 1)


@dataclass
class _Streams:
    """Says what it is asked for."""

    stream: int = 1
    in_capture: bool = False
    recordings: int = 0
    replays: int = 0
    waited: list[tuple[int, int]] = field(default_factory=list)
    allocation: int = 0
    expandable: bool = False
    room: int = 2**30

    def number(self, address: int) -> int:
        return 1000 * address + self.allocation

    def is_known(self, address: int) -> bool:
        return not self.expandable

    def free_bytes(self) -> int:
        return self.room

    def capturing(self) -> bool:
        return self.in_capture

    def current(self) -> int:
        return self.stream

    def wait(self, stream: int) -> None:
        self.waited.append((self.stream, stream))

    def recorded(self, execute: Callable[[], None]) -> _Streams:
        self.recordings += 1
        execute()
        return self

    def replay(self) -> None:
        self.replays += 1


class _Transport:
    """Counts a message for each pass that is executed."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.generation = 0
        self.said: list[str] = []
        self.failure: str | None = None

    def check(self) -> None:
        if self.failure is not None:
            raise TransportError(self.failure)

    def record(self, forget: Callable[[], None]) -> None:
        self.forget = forget
        self.said.append("record")

    def recorded(self) -> str:
        self.said.append("recorded")
        return "exchanges"

    def replay(self, recorded: Any) -> _Transport:
        self.said.append(f"replay {recorded}")
        return self

    def enqueued(self) -> None:
        self.said.append("enqueued")


@dataclass
class _Work:
    """A pass that counts how often it is executed."""

    place: int
    executed: int = 0

    def memory(self) -> Hashable:
        return self.place

    def moved(self) -> list[int]:
        return [self.place + 1]


class _World:
    def __init__(self) -> None:
        self.streams, self.traffic = _Streams(), Traffic()
        self.transport = _Transport(self.traffic)
        self.recorder = Recorder(self.traffic, self.streams)
        self.programs = [cast(Program, self._program()) for _ in range(2)]

    def _program(self) -> object:
        moving = (cast(Transport, self.transport),)
        return type("_Program", (), {"moving": moving})()

    def run(self, place: int = 5, program: int = 0) -> _Work:
        work = _Work(place)

        def execute() -> None:
            self.traffic.count(SENT, [BYTES], None)
            keep(("tables of", place))
            work.executed += 1

        self.recorder.run(self.programs[program], work, execute)
        return work


def test_the_third_time_is_recorded_and_then_only_played() -> None:
    world = _World()
    works = [world.run() for _ in range(7)]
    assert [work.executed for work in works] == [1, 1, 1, 0, 0, 0, 0]
    assert (world.streams.recordings, world.streams.replays) == (1, 5)


def test_what_is_played_counts_as_what_is_executed() -> None:
    """Also the pass that is recorded, whose exchanges take place when it is played."""
    world, plain = _World(), Traffic()
    for _ in range(7):
        world.run()
        plain.count(SENT, [BYTES], None)
        assert world.traffic.records() == plain.records()
    world.traffic.reset()
    world.run()
    assert world.traffic.records()[0].messages == 1


def test_transports_see_every_replay_begin_and_end() -> None:
    world = _World()
    for _ in range(4):
        world.run()
    assert world.transport.said == ["record", "recorded", *["replay exchanges", "enqueued"] * 2]


@pytest.mark.parametrize("change", ["memory", "program", "generation", "allocation"])
def test_another_pass_is_not_taken_for_a_known_one(change: str) -> None:
    world = _World()
    for _ in range(4):
        world.run()
    world.transport.generation += change == "generation"
    world.streams.allocation += change == "allocation"  # at the same address
    other = {"place": 6 if change == "memory" else 5, "program": int(change == "program")}
    assert [world.run(**other).executed for _ in range(4)] == [1, 1, 1, 0]
    if change in ("memory", "program"):
        assert world.run().executed == 0, "the first one is still known"


def test_memory_that_may_change_unseen_is_not_recorded() -> None:
    """As that of expandable segments, if anything moves."""
    world = _World()
    world.streams.expandable = True
    assert [world.run().executed for _ in range(5)] == [1] * 5 and world.recorder.recordings == 0


def test_nothing_is_recorded_where_memory_is_short() -> None:
    world = _World()
    world.streams.room = 2**20
    assert [world.run().executed for _ in range(5)] == [1] * 5
    world.streams.room = 2**30
    assert [world.run().executed for _ in range(2)] == [1, 0]


def test_nothing_is_recorded_into_a_graph_of_the_users() -> None:
    world = _World()
    for _ in range(4):
        world.run()
    world.streams.in_capture = True
    assert [world.run().executed for _ in range(4)] == [1] * 4
    world.streams.in_capture = False
    assert world.run().executed == 0


def test_replays_on_another_stream_come_after_the_last() -> None:
    world = _World()
    for number in (1, 1, 1, 1, 2, 2, 3, 1):
        world.streams.stream = number
        world.run()
    assert world.streams.waited == [(2, 1), (3, 2), (1, 3)]


def test_passes_that_never_recur_are_forgotten() -> None:
    world = _World()
    for place in range(400):
        world.run(place)
    (known,) = world.recorder._known.values()
    assert len(known) <= 256 and world.streams.recordings == 0
    assert world.run(399).executed == 1 and world.run(399).executed == 1
    assert world.streams.recordings == 1, "the newest are remembered"


def test_what_recurs_is_not_forgotten_for_what_does_not() -> None:
    world = _World()
    executed = 0
    for place in range(1, 1500):
        executed += world.run(0).executed
        world.run(place)
    assert executed == 3


def test_a_recording_keeps_the_tables_of_its_kernels_until_it_is_forgotten() -> None:
    world = _World()
    for _ in range(2):
        world.run()
        (known,) = world.recorder._known[world.programs[0]].values()
        assert known.tables == [("tables of", 5)], "no capture could make them"
    for _ in range(2):
        world.run()
    assert known.recording is not None and known.recording.kept == [("tables of", 5)]
    world.transport.forget()
    assert not world.recorder._known and world.run().executed == 1


def test_recordings_go_with_their_program() -> None:
    """Which goes with the sequence that it was made for."""
    world = _World()
    for _ in range(4):
        world.run(), world.run(program=1)
    assert world.recorder.recordings == 2
    world.programs.pop()
    gc.collect()
    assert world.recorder.recordings == 1 and world.run().executed == 0


def test_a_failed_recording_names_the_way_out() -> None:
    world = _World()

    def broken(execute: Callable[[], None]) -> _Streams:
        raise RuntimeError("operation not permitted when stream is capturing")

    world.streams.recorded = broken  # type: ignore[method-assign]
    world.run(), world.run()
    with pytest.raises(RuntimeError, match=r"not permitted .* cuda_graphs=False"):
        world.run()
    assert world.transport.said == ["record", "recorded"], (
        "or later exchanges would be taken for recorded ones"
    )


def test_a_recording_that_a_lost_peer_breaks_names_the_exchange() -> None:
    world = _World()

    def broken(execute: Callable[[], None]) -> _Streams:
        world.transport.failure = "nothing from rank 1"
        raise RuntimeError("operation failed due to a previous error during capture")

    world.streams.recorded = broken  # type: ignore[method-assign]
    world.run(), world.run()
    with pytest.raises(TransportError, match="nothing from rank 1"):
        world.run()


def test_an_error_keeps_no_recording() -> None:
    """Or who handles it would wait without end for NCCL, which waits for the end of the graph."""
    world = _World()
    for _ in range(4):
        world.run()
    (known,) = world.recorder._known[world.programs[0]].values()
    recording = weakref.ref(known.recording)
    del known
    world.transport.failure = "nothing from rank 1"
    with pytest.raises(TransportError) as raised:
        world.run()
    world.recorder.clear()
    assert raised.tb is not None and recording() is None


class _Cuda:
    """Graphs that share pools, and what PyTorch's allocator asserts of these."""

    def __init__(self) -> None:
        self.users: dict[int, int] = {}  # of every pool that there has been
        self.recorded_to: set[int] = set()
        self.unjoined = False  # a stream takes part in the capture whose work nobody waits for

    def graph_pool_handle(self) -> int:
        return len(self.users)

    def CUDAGraph(self) -> _CudaGraph:
        return _CudaGraph(self)


class _CudaGraph:
    def __init__(self, cuda: _Cuda) -> None:
        self.cuda = cuda
        self.pool: int | None = None

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        users = self.cuda.users
        assert users.get(pool) != 0, "use_count > 0"
        assert pool not in self.cuda.recorded_to, "already recording to mempool_id"
        users[pool] = users.get(pool, 0) + 1
        self.cuda.recorded_to.add(pool)
        self.begun = pool

    def capture_end(self) -> None:
        if self.cuda.unjoined:
            raise RuntimeError("capturing stream has unjoined work")
        self.cuda.recorded_to.remove(self.begun)
        self.pool = self.begun

    def reset(self) -> None:
        if self.pool is not None:
            self.cuda.users[self.pool] -= 1
            self.pool = None

    def __del__(self) -> None:
        self.reset()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    cuda = _Cuda()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", cuda.graph_pool_handle)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cuda.CUDAGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return cuda


def test_graphs_share_a_pool_and_a_pool_that_none_uses_is_not_used_again(cuda: _Cuda) -> None:
    """PyTorch allows the first and refuses the second."""
    streams = CudaStreams(torch.device("cuda", 0))
    graphs = [streams.recorded(lambda: None) for _ in range(3)]
    assert cuda.users == {0: 3}
    del graphs[:2]
    graphs.append(streams.recorded(lambda: None))
    assert cuda.users == {0: 2}
    graphs.clear()
    graphs.append(streams.recorded(lambda: None))
    assert cuda.users == {0: 0, 1: 1}


@pytest.mark.parametrize("unjoined", [False, True])
def test_others_are_recorded_after_a_broken_capture(cuda: _Cuda, unjoined: bool) -> None:
    streams = CudaStreams(torch.device("cuda", 0))
    graphs = [streams.recorded(lambda: None)]

    def execute() -> None:
        cuda.unjoined = unjoined
        raise torch.OutOfMemoryError("a full GPU")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        streams.recorded(execute)
    assert raised.tb is not None and (unjoined or cuda.users == {0: 1}), "the error keeps nothing of it"
    cuda.unjoined = False
    graphs += [streams.recorded(lambda: None) for _ in range(2)]
    assert sum(cuda.users.values()) == 3 + unjoined
