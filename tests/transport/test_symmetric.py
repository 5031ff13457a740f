"""The copy-engine transport on simulated streams: every order of execution gives the right bytes, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fake_streams import COMPUTE, Op, SharedMemory, Shuffled, World
from meshattn.transport.base import Message
from meshattn.transport.exchange import Place
from shuffled_ranks import CPU, NBYTES, Rank, ring_pass


def _expected(rank: int, ranks: int, hops: int, tag: int) -> list[int]:
    return [tag + (rank + hop) % ranks for hop in range(hops + 1)]


@pytest.mark.parametrize("one_queue", [False, True], ids=["queues", "one-queue"])
@pytest.mark.parametrize("slots", [2, 3], ids="{}-slots".format)
@pytest.mark.parametrize("ranks", [2, 3, 5], ids="P{}".format)
def test_a_ring_in_any_order(ranks: int, slots: int, one_queue: bool) -> None:
    """Passes follow each other without a pause, on slots that are poisoned once they are free."""
    for seed in range(10):
        world, memory = World(seed), SharedMemory(ranks)
        members = [Rank(world, memory, r, ranks, one_queue=one_queue) for r in range(ranks)]
        seen: list[list[int]] = [[] for _ in members]
        for number, tag in enumerate((0, 50, 100)):
            for member in members:
                ring_pass(member, ranks + 1, slots, seen[member.rank], tag, made=(seed + number) % 3 == 0)
        assert world.run(), f"standstill with seed {seed}"
        for member in members:
            want = [x for tag in (0, 50, 100) for x in _expected(member.rank, ranks, ranks + 1, tag)]
            assert seen[member.rank] == want, f"seed {seed}"


@pytest.mark.parametrize("slots", [2, 3], ids="{}-slots".format)
def test_chunks_go_on_while_the_first_is_still_computed_with(slots: int) -> None:
    """As far as there are slots; the others wait for those that are freed."""
    ranks, busy = 5, [True]
    for seed in range(5):
        world, memory, busy[0] = World(seed), SharedMemory(ranks), True
        members = [Rank(world, memory, r, ranks) for r in range(ranks)]
        seen: list[list[int]] = [[] for _ in members]
        for member in members:
            received = member.transport.buffers("col", "inward", NBYTES, slots, CPU)
            own = torch.full((NBYTES,), member.rank, dtype=torch.uint8)
            current: tuple[Tensor, Any] = own, None
            for hop in range(ranks - 1):
                slot = hop % slots
                message = member.message(slot, hop, made=False, again=hop + slots < ranks - 1)
                handle = member.transport.start(message, [current[0]], [received[slot]])
                if hop == 0:  # a block that takes long
                    member.ops.enqueue(COMPUTE, Op(lambda: None, lambda: not busy[0], "long"))
                handle.wait()
                member.compute(lambda x=current[0], log=seen[member.rank]: log.append(int(x[0])))
                if current[1] is not None:
                    member.compute(lambda x=current[0]: x.fill_(255))
                    current[1].release()
                current = received[slot], handle
            member.compute(lambda x=current[0], log=seen[member.rank]: log.append(int(x[0])))
            current[1].release()
        assert not world.run(), "the long block still runs"
        for member in members:
            here = [int(x[0]) for x in member.transport.buffers("col", "inward", NBYTES, slots, CPU)]
            assert here == [(member.rank + hop + 1) % ranks for hop in range(slots)], f"seed {seed}"
            assert not seen[member.rank]
        busy[0] = False
        assert world.run()
        assert seen == [_expected(rank, ranks, ranks - 1, 0) for rank in range(ranks)], f"seed {seed}"


def _pairs(world: World, ranks: int, slots: int, passes: int) -> list[list[int]] | None:
    """Every rank pushes again and again into the same slots, waits, reads, releases; None: a standstill."""
    memory = SharedMemory(ranks)
    seen: list[list[int]] = [[] for _ in range(ranks)]
    members = [Rank(world, memory, r, ranks) for r in range(ranks)]
    for number in range(passes):
        for member in members:
            slot = number % slots
            received = member.transport.buffers("col", "inward", NBYTES, slots, CPU)
            own = torch.empty(NBYTES, dtype=torch.uint8)
            member.compute(lambda own=own, value=number: own.fill_(value))
            handle = member.transport.start(member.message(slot), [own], [received[slot]])
            handle.wait()

            def use(
                chunk: Tensor = received[slot], log: list[int] = seen[member.rank], own: Tensor = own
            ) -> None:
                log.extend(sorted({int(x) for x in chunk}))
                chunk.fill_(255)
                own.fill_(254)

            member.compute(use)
            handle.release()
    return seen if world.run() else None


@pytest.mark.parametrize("slots", [1, 2, 3], ids="{}-slots".format)
@pytest.mark.parametrize("ranks", [2, 4], ids="P{}".format)
def test_slots_are_filled_again_only_when_free(ranks: int, slots: int) -> None:
    for seed in range(15):
        assert _pairs(World(seed), ranks, slots, 8) == [list(range(8))] * ranks, f"seed {seed}"


def _without_waits(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    """Exchanges do not wait for this flag."""
    wait, left_out, of = Shuffled.wait, set[int](), Place.of

    def placed(*args: Any) -> Place:
        place = of(*args)
        left_out.add(getattr(place, flag))
        return place

    def some(self: Shuffled, stream: int, address: int, value: int) -> None:
        if address not in left_out:
            wait(self, stream, address, value)

    monkeypatch.setattr(Place, "of", placed)
    monkeypatch.setattr(Shuffled, "wait", some)


def test_without_grants_a_slot_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the test above can fail."""
    _without_waits(monkeypatch, "granted")
    assert any(_pairs(World(seed), 3, 1, 8) != [list(range(8))] * 3 for seed in range(15))


def test_without_the_ready_flag_a_slot_is_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_waits(monkeypatch, "ready")
    assert any(_pairs(World(seed), 2, 1, 4) != [list(range(4))] * 2 for seed in range(15))


def _many_peers(world: World, ranks: int, slots: int, one_queue: bool) -> list[list[int]] | None:
    """Every rank gets from each other rank in turn, several exchanges under way at once."""
    memory = SharedMemory(ranks)
    seen: list[list[int]] = [[] for _ in range(ranks)]
    members = [Rank(world, memory, r, ranks, one_queue=one_queue) for r in range(ranks)]
    for _ in range(2):
        for member in members:
            received = member.transport.buffers("col", "inward", NBYTES, slots, CPU)
            own = torch.full((NBYTES,), member.rank, dtype=torch.uint8)
            handles: list[Any] = []

            def take(member: Rank = member, handles: list[Any] = handles) -> None:
                handle, chunk = handles.pop(0)
                handle.wait()
                log = seen[member.rank]

                def use() -> None:
                    log.extend(sorted({int(x) for x in chunk}))
                    chunk.fill_(255)

                member.compute(use)
                handle.release()

            for offset in range(1, ranks):
                slot = (offset - 1) % slots
                if len(handles) == slots:
                    take()
                to, source = (member.rank - offset) % ranks, (member.rank + offset) % ranks
                message = Message("forward", "col", "inward", f"direct {offset}", to, source, slot)
                handles.append((member.transport.start(message, [own], [received[slot]]), received[slot]))
            while handles:
                take()
            member.compute(lambda own=own: own.fill_(254))
    return seen if world.run() else None


@pytest.mark.parametrize("one_queue", [False, True], ids=["queues", "one-queue"])
@pytest.mark.parametrize("slots", [1, 2, 3], ids="{}-slots".format)
def test_a_slot_may_be_filled_by_another_rank_each_time(slots: int, one_queue: bool) -> None:
    for seed in range(15):
        want = [[(rank + offset) % 5 for _ in range(2) for offset in range(1, 5)] for rank in range(5)]
        assert _many_peers(World(seed), 5, slots, one_queue) == want, f"seed {seed}"


def test_a_pass_on_another_stream_waits_for_the_last_one() -> None:
    for seed in range(15):
        world, memory = World(seed), SharedMemory(2)
        members = [Rank(world, memory, r, 2) for r in range(2)]
        seen: list[list[int]] = [[], []]
        for number, tag in enumerate((0, 50, 100, 150)):
            for member in members:
                member.ops.stream = COMPUTE + 100 * (number % 2)
                ring_pass(member, 3, 2, seen[member.rank], tag)
        assert world.run()
        want = [[x for tag in (0, 50, 100, 150) for x in _expected(r, 2, 3, tag)] for r in range(2)]
        assert [sorted(x) for x in seen] == [sorted(x) for x in want], f"seed {seed}"


def test_halves_that_are_left_out_leave_the_flags_alone() -> None:
    """Rank 0 sends nothing now and then, of which rank 1 knows."""
    for seed in range(20):
        world, memory = World(seed), SharedMemory(2)
        members = [Rank(world, memory, r, 2) for r in range(2)]
        seen: list[list[int]] = [[], []]
        for number in range(9):
            for member in members:
                (received,) = member.transport.buffers("col", "inward", NBYTES, 1, CPU)
                own = torch.full((NBYTES,), number, dtype=torch.uint8)
                skipped = number % 3 == 1
                send = None if skipped and member.rank == 0 else [own]
                recv = None if skipped and member.rank == 1 else received
                handle = member.transport.start(member.message(0), send, None if recv is None else [recv])
                handle.wait()
                if recv is not None:
                    log = seen[member.rank]
                    member.compute(lambda log=log, x=recv: log.append(int(x[0])))
                member.compute(lambda own=own: own.fill_(255))
                handle.release()
        assert world.run()
        assert seen == [list(range(9)), [n for n in range(9) if n % 3 != 1]]
