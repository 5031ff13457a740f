"""Exchanges of the copy-engine transport in graphs of the mesh: any order of execution, and peers that are
gone."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from fake_streams import COMPUTE, Op, SharedMemory, Tape, World
from meshattn.transport.base import Handle, Message
from shuffled_ranks import CPU, NBYTES, Rank, ring_pass, run_ring
from waiting import eventually

TIMEOUT = 0.2


def _graph(member: Rank, hops: int, slots: int, seen: list[int], tag: int) -> tuple[Tape, object]:
    """A ring pass as a graph, and what the transport keeps of its exchanges."""
    received = member.transport.buffers("col", "inward", NBYTES, slots, CPU)
    member.transport.record(lambda: None)
    tape = member.ops.record_tape(lambda: run_ring(member, received, hops, seen, tag))
    return tape, member.transport.recorded()


def _replay(member: Rank, graph: tuple[Tape, object], slots: int) -> None:
    member.transport.buffers("col", "inward", NBYTES, slots, CPU)
    replay = member.transport.replay(graph[1])
    graph[0].replay()
    replay.enqueued()


@pytest.mark.parametrize("one_queue", [False, True], ids=["queues", "one-queue"])
@pytest.mark.parametrize("ranks, slots", [(2, 2), (3, 2), (5, 3)], ids=["P2", "P3", "P5"])
def test_replays_and_eager_passes_in_turns(ranks: int, slots: int, one_queue: bool) -> None:
    """Each rank for itself: what is enqueued is the same. The chunks are those of every single pass."""
    for seed in range(10):
        world, memory = World(seed), SharedMemory(ranks)
        members = [Rank(world, memory, r, ranks, one_queue=one_queue) for r in range(ranks)]
        seen: list[list[int]] = [[] for _ in members]
        graphs = [_graph(member, ranks + 1, slots, seen[member.rank], 50) for member in members]
        assert not any(seen), "recording runs nothing"
        for number in range(6):
            for member in members:
                if (number + member.rank + seed) % 3:
                    _replay(member, graphs[member.rank], slots)
                else:
                    ring_pass(member, ranks + 1, slots, seen[member.rank], 50)
        assert world.run(), f"standstill with seed {seed}"
        for member in members:
            once = [50 + (member.rank + hop) % ranks for hop in range(ranks + 2)]
            assert seen[member.rank] == once * 6, f"seed {seed}"
            assert member.engine.ended() in (0, 2 * (ranks + 1))


@pytest.mark.parametrize("done", [0, 1, 2], ids="after-{}".format)
def test_a_replay_that_stands_still_names_the_exchange(done: int) -> None:
    """Rank 1 takes part in some passes and in the first exchanges of one more, and is gone."""
    world, memory = World(7), SharedMemory(2)
    members = [Rank(world, memory, r, 2, timeout=TIMEOUT) for r in range(2)]
    seen: list[list[int]] = [[], []]
    graph = _graph(members[0], 3, 2, seen[0], 0)
    for _ in range(2):
        _replay(members[0], graph, 2)
        ring_pass(members[1], 3, 2, seen[1], 0)
    _replay(members[0], graph, 2)
    if done:
        ring_pass(members[1], done, 2, seen[1], 0)
    assert not world.run(), "rank 1 is gone"
    assert eventually(lambda: members[0].engine.watch.failure is not None, 10)
    failure = members[0].engine.watch.failure
    assert failure is not None and failure.startswith(f"forward step {done}/9, kv #1: "), failure
    assert "rank 11" in failure and f"within {TIMEOUT} s" in failure
    assert eventually(world.run, 10), "the watch lets go of all that waits"


def test_a_replay_behind_long_work_has_not_begun() -> None:
    """Its time counts from when nothing of this rank holds it up."""
    world, memory, busy = World(3), SharedMemory(2), [True]
    members = [Rank(world, memory, r, 2, timeout=TIMEOUT) for r in range(2)]
    graph = _graph(members[0], 2, 2, [], 0)
    members[0].ops.enqueue(COMPUTE, Op(lambda: None, lambda: not busy[0], "long"))
    _replay(members[0], graph, 2)
    assert not world.run(), "the long work still runs"
    time.sleep(2 * TIMEOUT)
    assert members[0].engine.watch.failure is None
    busy[0] = False
    ring_pass(members[1], 2, 2, [], 0)
    assert world.run() and members[0].engine.watch.failure is None


def test_replays_need_no_more_events_and_growth_tells_that_memory_moves() -> None:
    world, memory = World(3), SharedMemory(2)
    members = [Rank(world, memory, r, 2) for r in range(2)]
    graph, events = _graph(members[0], 2, 2, [], 0), []
    for _ in range(6):
        _replay(members[0], graph, 2)
        ring_pass(members[1], 2, 2, [], 0)
        assert world.run()
        assert eventually(lambda: not members[0].engine.watch._pending, 10)
        events.append(len(members[0].ops.events))
    assert events[-1] == events[1]
    before = members[0].transport.generation
    for nbytes, more in ((NBYTES, 0), (1000 * NBYTES, 1)):
        members[0].transport.buffers("col", "inward", nbytes, 2, CPU)
        assert members[0].transport.generation == before + more


def test_recorded_ends_hold_no_memory() -> None:
    """What is received in may go before the graph does."""
    world, memory = World(3), SharedMemory(2)
    members = [Rank(world, memory, r, 2) for r in range(2)]
    _, ends = _graph(members[0], 2, 2, [], 0)
    assert isinstance(ends, tuple) and len(ends) == 4
    assert not any(isinstance(value, torch.Tensor) for end in ends for value in vars(end).values())


def _swap(member: Rank, peer: int, axis: str, sent: Tensor, received: Tensor) -> Handle:
    message = Message("forward", axis, "inward", f"forward, {axis}", peer, peer)
    return member.transport.start(message, [sent], [received])


def test_a_pass_that_ends_hides_no_exchange_beside_it() -> None:
    """That of a head axis, whose peer is gone, beside the pass of a group of heads, whose peer is not."""
    world, memory = World(5), SharedMemory(3)
    here, _, there = (Rank(world, memory, r, 3, timeout=TIMEOUT) for r in range(3))
    sent = torch.zeros(NBYTES, dtype=torch.uint8)
    buffers = [
        [member.transport.buffers(axis, "inward", NBYTES, 1, CPU)[0] for axis in ("heads", "col")]
        for member in (here, there)
    ]

    def swap(member: Rank, peer: int, received: Tensor) -> None:
        handle = _swap(member, peer, "col", sent, received)
        handle.wait()
        handle.release()

    here.transport.record(lambda: None)
    tape = here.ops.record_tape(lambda: swap(here, 2, buffers[0][1]))
    recorded = here.transport.recorded()
    beside = _swap(here, 1, "heads", sent, buffers[0][0])
    replay = here.transport.replay(recorded)
    tape.replay()
    replay.enqueued()
    swap(there, 0, buffers[1][1])
    assert not world.run(), "rank 1 is gone"
    time.sleep(TIMEOUT / 4)  # the watch looks several times
    beside.wait()
    assert not world.run()
    assert eventually(lambda: here.engine.watch.failure is not None, 10)
    assert "heads: rank 11" in str(here.engine.watch.failure)
    assert eventually(world.run, 3), "the watch lets go of all that waits"
