"""When exchanges begin and end beside kernels and each other, played by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshattn.plan import Tile
from meshattn.plan.passes import pass_script
from meshattn.plan.placement import Cut, MeshAxis, Placement
from meshattn.plan.script import Entry, Exchange, Free, Kernel, Script, Slot, Wait
from meshattn.plan.timeline import run
from plan.topology_cases import call, cluster

SLOT: Slot = ("col", 1)


def played(gpus_per_node: int, tile: Tile, *entries: Entry, copy_engines: bool = False) -> list[float]:
    """When each rank ends; a GB/s is a thousand bytes a microsecond, latency 1, exchanges move 5000 bytes."""
    topology = cluster(gpus_per_node, inside=1.0, between=1.0, latency_us=1.0, copy_engines=copy_engines)
    topology = replace(topology, between=replace(topology.across, copy_engines=copy_engines))
    placement = Placement(Cut(1, tile), ("row", "col", "heads"), gpus_per_node)
    timeline = run(Script("by hand", placement, entries, room="none"), topology)
    return [timeline.end_us[kind] for kind in timeline.kind]


def only(number: int, axis: MeshAxis, offset: int, ranks: int, sender: int) -> Exchange:
    return Exchange(number, "x", axis, offset, 5000, tuple(rank == sender for rank in range(ranks)))


@pytest.mark.parametrize("gpus_per_node", [1, 3], ids=["across", "inside"])
def test_an_exchange_waits_for_both_ends_and_holds_both_up(gpus_per_node: int) -> None:
    work = Kernel("work", (1.0, 10.0, 2.0))
    # Rank 2 sends to rank 1, which comes to it at 10; rank 0 has no part in it.
    assert played(gpus_per_node, Tile(1, 3), work, only(0, "col", -1, 3, 2), Wait(0)) == [1.0, 16.0, 16.0]


@pytest.mark.parametrize("gpus_per_node", [1, 3], ids=["across", "inside"])
@pytest.mark.parametrize("copies", [False, True], ids=["kernels-first", "copy-engines"])
def test_copy_engines_pass_on_what_kernels_did_not_make(copies: bool, gpus_per_node: int) -> None:
    """What came at 6 is used by a kernel until 16 and goes on at once; what that kernel made waits for it."""
    work = Kernel("work", 10.0)
    for made, done in ((False, 16.0 if copies else 22.0), (True, 22.0)):
        first, onward = (Exchange(n, "x", "col", -1, 5000, made=made) for n in range(2))
        entries = first, Wait(0), work, onward, Wait(1)
        ends = played(gpus_per_node, Tile(1, 3), *entries, copy_engines=copies)
        assert ends == [done] * 3


def test_a_chunk_waits_for_the_slot_that_it_fills_and_for_no_later_kernel() -> None:
    first, second = (Exchange(n, "x", "col", -1, 5000, made=False, slot=SLOT) for n in range(2))
    work, more, wait = Kernel("work", 10.0), Kernel("more", 2.0), Wait(1)
    for last_uses, done in (
        ((work, Free(SLOT), more), 22.0),
        ((work, more, Free(SLOT)), 24.0),
        ((work, more), 18.0),
    ):
        assert (
            played(3, Tile(1, 3), first, Wait(0), *last_uses, second, wait, copy_engines=True) == [done] * 3
        )


@pytest.mark.parametrize("gpus_per_node", [1, 3], ids=["across", "inside"])
def test_who_waits_for_an_arrival_has_made_all_copies_queued_before(gpus_per_node: int) -> None:
    """They stand on one stream: rank 1 sends until 12, though what it waits for came at 6."""
    own, more = Exchange(0, "x", "col", -1, 5000, made=False), only(1, "col", -1, 3, 1)
    entries = own, more, Wait(0), Kernel("work", 1.0), Wait(1)
    assert played(gpus_per_node, Tile(1, 3), *entries, copy_engines=True) == [12.0, 13.0, 7.0]


@pytest.mark.parametrize("gpus_per_node", [1, 3], ids=["across", "inside"])
def test_one_at_a_time_comes_in(gpus_per_node: int) -> None:
    """Through the port inside a node, and by the stream of the receiver between nodes."""
    first, second = only(0, "col", -1, 3, 2), only(1, "col", 1, 3, 0)  # both to rank 1
    assert played(gpus_per_node, Tile(1, 3), first, second, Wait(0), Wait(1)) == [12.0, 12.0, 6.0]


def test_the_exchanges_of_a_batch_share_a_latency() -> None:
    topology = cluster(4, inside=1.0, latency_us=1000.0)
    shape = call(100)
    script = pass_script("forward", shape, Cut(4, Tile(1, 1)), topology)
    (kernel,) = [e.us for e in script.entries if isinstance(e, Kernel) and e.name.startswith("block")]
    moved = sum(e.num_bytes for e in script.entries if isinstance(e, Exchange)) / 1e3
    assert run(script, topology).total_us == pytest.approx(2 * 1000 + moved + float(str(kernel)), rel=1e-4)
