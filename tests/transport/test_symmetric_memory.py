"""Receive memory of copy engines, what a pass that breaks off leaves, and peers that are lost."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

from fake_streams import SharedMemory, World
from meshattn.transport.base import TransportError
from meshattn.transport.slots import SlotLayout
from shuffled_ranks import CPU, NBYTES, Rank, ring_pass


def test_memory_grows_with_the_largest_pass_and_is_used_again() -> None:
    world, memory = World(0), SharedMemory(2)
    members = [Rank(world, memory, r, 2) for r in range(2)]

    def addresses(nbytes: int, slots: int, flow: str = "inward") -> list[list[int]]:
        made = [m.transport.buffers("col", flow, nbytes, slots, CPU) for m in members]
        assert all(x.numel() == nbytes and x.dtype == torch.uint8 for own in made for x in own)
        return [[x.data_ptr() for x in own] for own in made]

    first = addresses(1000, 2)
    assert addresses(900, 1) == [own[:1] for own in first]
    assert memory.sizes == [SlotLayout.of(2, 1000, 2).nbytes]
    assert addresses(1000, 2, "outward") != first, "chunks and partial results are live together"
    assert addresses(1000, 2) == first
    grown = addresses(3000, 1)
    assert len(memory.sizes) == 3 and addresses(1000, 2)[0][0] == grown[0][0]
    assert addresses(10, 0) == [[], []] and len(memory.sizes) == 3


def test_memory_is_given_back_at_the_end_and_not_by_the_garbage_collector() -> None:
    """Which may come while a CUDA graph is captured, where freeing ends the process."""
    world, memory = World(0), SharedMemory(2)
    members = [Rank(world, memory, r, 2) for r in range(2)]
    for member in members:
        (received,) = member.transport.buffers("col", "inward", NBYTES, 1, CPU)
        own = torch.zeros(NBYTES, dtype=torch.uint8)
        member.transport.start(member.message(0), [own], [received]).wait()  # the watch knows both halves
        del received
    regions = [weakref.ref(m.transport._arenas["col", "inward"].region) for m in members]
    gc.disable()
    try:
        for member in members:
            member.engine.close()
            member.transport.close()
        assert [region() for region in regions] == [None, None]
    finally:
        gc.enable()


def test_memory_does_not_grow_inside_a_graph() -> None:
    member = Rank(World(0), SharedMemory(1), 0, 1)
    member.transport.buffers("col", "inward", 64, 1, CPU)
    member.ops.in_capture = True
    member.transport.buffers("col", "inward", 64, 1, CPU)
    with pytest.raises(ValueError, match="run it once before it is captured"):
        member.transport.buffers("col", "inward", 65_000, 1, CPU)


def test_a_pass_that_broke_off_is_remembered() -> None:
    world, memory = World(0), SharedMemory(2)
    members = [Rank(world, memory, r, 2) for r in range(2)]
    for member in members:
        (received,) = member.transport.buffers("col", "inward", NBYTES, 1, CPU)
        member.transport.start(member.message(0), [torch.zeros(NBYTES, dtype=torch.uint8)], [received])
    with pytest.raises(TransportError, match="broke off with 1 exchange"):
        members[0].transport.buffers("col", "inward", NBYTES, 1, CPU)


def test_events_are_used_again() -> None:
    world, memory = World(0), SharedMemory(2)
    members = [Rank(world, memory, r, 2) for r in range(2)]
    made = []
    for number in range(4):
        for member in members:
            ring_pass(member, 2, 2, [], number)
        assert world.run()
        time.sleep(0.4)  # the watch takes them back
        made.append(len(members[0].ops.events))
    assert made[3] == made[1] <= made[0] + 4


def test_a_lost_peer_is_named_and_its_bytes_become_nan() -> None:
    """Rank 1 of two does not push; rank 0 is let go, and reads NaN."""
    world, memory = World(0), SharedMemory(2)
    members = [Rank(world, memory, r, 2, timeout=0.3) for r in range(2)]
    (received,), _ = (m.transport.buffers("col", "inward", NBYTES, 1, CPU) for m in members)
    me = members[0]
    own = torch.zeros(NBYTES, dtype=torch.uint8)
    me.transport.start(me.message(0, 4), [own], [received]).wait()
    assert not world.run(), "it waits"
    assert not received.any()
    _until_failure(me)
    assert world.run()
    assert received.view(torch.float32).isnan().all()
    told = r"^forward step 4/9, kv #1: (nothing from rank 11|rank 11 did not take it) within 0.3 s$"
    with pytest.raises(TransportError, match=told):
        me.transport.check()
    with pytest.raises(TransportError, match=told):
        me.transport.start(me.message(0), [own], [received])


def test_a_peer_that_never_frees_its_slot_is_named_and_gets_nan() -> None:
    world, memory = World(0), SharedMemory(2)
    members = [Rank(world, memory, r, 2, timeout=0.3) for r in range(2)]
    for number in range(2):
        for member in members[: 2 - number]:
            (received,) = member.transport.buffers("col", "inward", NBYTES, 1, CPU)
            own = torch.full((NBYTES,), number, dtype=torch.uint8)
            handle = member.transport.start(member.message(0), [own], [received])
            if member.rank == 0 and number == 0:
                handle.wait()
                handle.release()
    assert not world.run()
    _until_failure(members[0])
    assert world.run()
    assert members[0].engine.watch.failure == "forward step 0/9, kv #1: rank 11 did not take it within 0.3 s"
    theirs = members[1].transport._arenas["col", "inward"].region.local[:NBYTES]
    assert theirs.view(torch.float32).isnan().all()


def _until_failure(rank: Rank) -> None:
    deadline = time.monotonic() + 10
    while rank.engine.watch.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
