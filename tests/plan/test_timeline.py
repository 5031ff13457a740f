"""The emulator against bounds, hand formulas, and itself."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshattn.plan import Direction, Tile, payload_bytes
from meshattn.plan.block_cost import Mask, block_times, partial_us
from meshattn.plan.heads import head_groups
from meshattn.plan.kernel_times import KernelTimes
from meshattn.plan.links import _counts, link_use
from meshattn.plan.pace import num_groups, pace_of
from meshattn.plan.passes import pass_script
from meshattn.plan.placement import ORDER, Cut, MeshAxis, Placement
from meshattn.plan.script import (
    Entry,
    Exchange,
    Free,
    Kernel,
    Script,
    Slot,
    Wait,
)
from meshattn.plan.timeline import Fabric, Timeline, run
from meshattn.plan.topology import Topology
from meshattn.plan.trace import trace_events, write_trace
from plan.topology_cases import FLAT, call, cluster

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
CUTS = [Cut(1, Tile(1, 8)), Cut(1, Tile(8, 1)), Cut(1, Tile(2, 6)), Cut(1, Tile(6, 4)), Cut(2, Tile(3, 4)),
        Cut(4, Tile(1, 3)), Cut(8, Tile(1, 1))]  # fmt: skip


def emulate(
    direction: Direction,
    cut: Cut,
    topology: Topology,
    rows: int = 500,
    *,
    paced: bool = True,
    **options: bool,
) -> Timeline:
    order = cut.orders(topology.gpus_per_node)[-1]
    pace = {"pace": pace_of(topology, cut, order)} if paced else {}
    return run(pass_script(direction, call(rows), cut, topology, order=order, **pace), topology, **options)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_never_faster_than_kernels_or_the_busiest_link(direction: Direction, cut: Cut) -> None:
    for between, nics in ((1.0, 1), (1.0, 2), (50.0, 2), (1000.0, 1)):
        topology = cluster(4, between=between, gpus_per_nic=nics, copy_engines=nics == 2)
        timeline = emulate(direction, cut, topology)
        use = link_use(direction, call(500), timeline.script.placement, topology)
        kernels = sum(
            e.us for e in timeline.script.entries if isinstance(e, Kernel) and not isinstance(e.us, tuple)
        )
        assert timeline.total_us >= max(kernels, use.port_us, use.card_us) * (1 - 1e-9)
        assert min(timeline.compute_us) == pytest.approx(kernels)
        sent = sum(e.num_bytes for e in timeline.script.entries if isinstance(e, Exchange))
        assert sent == use.rank


@pytest.mark.parametrize("gb_per_s", [0.5, 3.0, 20.0, 70.0])
def test_a_ring_with_equal_links_is_the_hand_formula(gb_per_s: float) -> None:
    """Up to one hop, which the list exposes where blocks take longer: it starts behind the own block."""
    topology, shape, ranks = cluster(16, inside=gb_per_s, latency_us=3.0), call(500), 7
    first, more = (block_times(topology.kernels, shape)[what][1] for what in ("forward", "merging"))
    hop = topology.inside.latency_us + payload_bytes("kv", shape) / (1e3 * gb_per_s)
    by_hand = max(first, hop) + (ranks - 2) * max(more, hop) + more
    time = emulate("forward", Cut(1, Tile(1, ranks)), topology).total_us
    spare = 0.0 if hop >= more else hop
    assert by_hand * (1 - 1e-6) <= time <= (by_hand + spare) * (1 + 1e-6)


@pytest.mark.parametrize("gb_per_s", [0.5, 3.0, 20.0, 70.0])
def test_copy_engines_expose_no_hop_of_a_ring_but_the_first(gb_per_s: float) -> None:
    """Where hops take longer than blocks they follow each other; else every one has come when it is wanted,
    as long as there is a slot for it."""
    topology = cluster(16, inside=gb_per_s, latency_us=3.0, copy_engines=True)
    shape, ranks = call(500), 7
    first, more = (block_times(topology.kernels, shape)[what][1] for what in ("forward", "merging"))
    hop = topology.inside.latency_us + payload_bytes("kv", shape) / (1e3 * gb_per_s)
    by_hand = max(first + (ranks - 1) * more, (ranks - 1) * hop + more)
    assert emulate("forward", Cut(1, Tile(1, ranks)), topology).total_us == pytest.approx(by_hand)


@pytest.mark.parametrize("cut", CUTS[:2], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_copy_engines_make_no_chain_slower(direction: Direction, cut: Cut) -> None:
    """Tiles they may: all copies of a rank stand on one stream, arrivals too."""
    for inside, gpus in ((100.0, 4), (5.0, 4), (5.0, 48), (1.0, 48)):
        times = [
            emulate(direction, cut, cluster(gpus, inside=inside, latency_us=2.0, copy_engines=which)).total_us
            for which in (False, True)
        ]
        assert times[1] <= times[0] * (1 + 1e-9)


def test_a_ring_is_as_slow_as_its_slowest_hop() -> None:
    inside = cluster(16, inside=1.0)
    mixed = cluster(4, inside=100.0, between=1.0)
    cut = Cut(1, Tile(1, 8))
    assert emulate("forward", cut, mixed).total_us == pytest.approx(emulate("forward", cut, inside).total_us)


@pytest.mark.parametrize("copies", [False, True], ids=["kernels-first", "copy-engines"])
@pytest.mark.parametrize("cut", CUTS[2:5], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_time_falls_where_a_cost_rises(direction: Direction, cut: Cut, copies: bool) -> None:
    """With the list as it is: another cluster may have another list."""
    base = {"inside": 20.0, "between": 4.0, "latency_us": 1.0, "start_us": 0.1}
    for name in base:
        totals = []
        for factor in (1.0, 1.3, 2.0, 5.0):
            changed = {**base, name: base[name] * factor}
            topology = cluster(4, **changed, copy_engines=copies)
            totals.append(emulate(direction, cut, topology, paced=False).total_us)
        if name in ("inside", "between"):
            totals.reverse()
        assert totals == sorted(totals), name
        assert name in ("inside", "start_us") or totals[0] < totals[-1], name


@pytest.mark.parametrize("copies", [False, True], ids=["kernels-first", "copy-engines"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_following_one_rank_of_a_kind_is_exact(cut: Cut, copies: bool) -> None:
    topology = cluster(3, between=7.0, latency_us=1.0, gpus_per_nic=2, copy_engines=copies)
    script = pass_script("backward", call(300), cut, topology)
    kinds = run(script, topology)
    each = run(script, topology, every_rank=True)
    assert len(each.end_us) == cut.ranks >= len(kinds.end_us)
    assert [kinds.end_us[kind] for kind in kinds.kind] == pytest.approx(list(each.end_us))
    assert emulate("backward", cut, topology) == emulate("backward", cut, topology)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_following_one_rank_of_a_kind_is_exact_where_blocks_differ(cut: Cut) -> None:
    """Ranks that share a chunk do the same, and are of one kind where they are placed alike."""
    topology = cluster(3, between=7.0, latency_us=1.0, gpus_per_nic=2)
    for direction in DIRECTIONS:
        script = pass_script(direction, call(300), cut, topology, mask=triangle(cut.tile.ranks))
        kinds, each = (run(script, topology, every_rank=every) for every in (False, True))
        assert [kinds.end_us[kind] for kind in kinds.kind] == pytest.approx(list(each.end_us))
        assert max(kinds.compute_us) == pytest.approx(max(each.compute_us))


def test_ranks_of_a_chunk_are_of_one_kind() -> None:
    script = pass_script("forward", call(300), Cut(4, Tile(1, 3)), cluster(4), mask=triangle(3))
    assert len(run(script, cluster(4)).end_us) == 3


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("cut", [*CUTS, Cut(3, Tile(4, 4)), Cut(2, Tile(2, 8))], ids=str)
def test_a_period_of_ranks_tells_what_all_of_them_do(
    cut: Cut, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology, found = cluster(gpus, between=7.0, gpus_per_nic=2), []
    for of_all in (False, True):
        if of_all:
            monkeypatch.setattr(Placement, "period", cut.ranks)
        each = []
        for order in itertools.permutations(ORDER):
            script = pass_script("backward", call(300, heads=24), cut, topology, order=order)
            fabric = Fabric(script, topology)
            sharing = [counts * (cut.ranks // len(counts)) for counts in fabric.sharers]
            each.append((sharing, fabric.kind, _counts.__wrapped__(script.placement)))
        found.append(each)
    assert found[0] == found[1]


def test_the_period_is_short_where_axes_fill_nodes() -> None:
    for order in itertools.permutations(ORDER):
        assert Placement(Cut(8, Tile(16, 8)), order, 8).period == 8
        assert Placement(Cut(1, Tile(1, 9)), order, 4).period == 9
    assert Placement(Cut(5, Tile(2, 6)), ("heads", "row", "col"), 4).period == 20


def test_large_meshes_have_few_kinds_of_ranks() -> None:
    topology = cluster(8)
    script = pass_script("forward", call(64), Cut(1, Tile(8, 32)), topology)
    assert len(set(Fabric(script, topology).kind)) <= 8


def triangle(chunks: int) -> Mask:
    """Causal with contiguous chunks."""
    return Mask(chunks, lambda p, q: 1.0 if q < p else 0.5 if q == p else 0.0)


def test_uneven_blocks_are_as_slow_as_the_busiest_rank_and_skip_hops() -> None:
    topology, cut = cluster(4), Cut(1, Tile(1, 8))
    mask = triangle(8)
    script = pass_script("forward", call(400), cut, topology, mask=mask)
    timeline = run(script, topology)
    assert len(timeline.end_us) == 8
    half, whole = block_times(topology.kernels, call(400))["merging"]
    assert max(timeline.compute_us) == pytest.approx(half + 7 * whole)
    assert min(timeline.compute_us) == pytest.approx(half)
    every = pass_script("forward", call(400), cut, topology)
    sends = sum(sum(e.sends or (True,) * 8) for e in script.entries if isinstance(e, Exchange))
    assert 0 < sends < 8 * every.num_exchanges
    assert timeline.total_us <= run(every, topology).total_us


def test_an_even_mask_is_no_mask() -> None:
    topology, cut = cluster(4, latency_us=2.0), Cut(1, Tile(2, 4))
    for part, causal in ((0.5, True), (1.0, False)):
        shape = call(300, causal=causal)
        plain = run(pass_script("backward", shape, cut, topology), topology)
        masked = run(
            pass_script("backward", shape, cut, topology, mask=Mask(8, lambda p, q, part=part: part)),
            topology,
        )
        assert masked.total_us == pytest.approx(plain.total_us)


def test_exchanges_that_take_multiprocessors_slow_the_kernels_beside_them() -> None:
    cut = Cut(1, Tile(1, 8))
    free, taken = (emulate("forward", cut, cluster(4, between=40.0, sm_share=share)) for share in (0.0, 0.2))
    assert taken.total_us > free.total_us
    assert max(taken.compute_us) <= max(free.compute_us) / 0.8 + 1e-9
    inside = emulate("forward", cut, cluster(8, sm_share=0.2))
    assert inside.total_us == emulate("forward", cut, cluster(8)).total_us


def test_a_host_that_is_too_slow_rules_the_time() -> None:
    slow = emulate("forward", Cut(1, Tile(1, 4)), cluster(4, start_us=1e5), rows=16)
    kernels = [e for e in slow.script.entries if isinstance(e, Kernel)]
    assert slow.total_us >= 1e5 * (len(kernels) + slow.script.num_exchanges)


def test_events_tell_what_happened(tmp_path: Path) -> None:
    topology = cluster(2, latency_us=1.0)
    timelines = [emulate(direction, Cut(2, Tile(1, 3)), topology, record=True) for direction in DIRECTIONS]
    for timeline in timelines:
        for rank in timeline.ranks_by_kind:
            for lane in ("compute", "node", "net"):
                own = [event for event in timeline.events if (event.rank, event.lane) == (rank, lane)]
                assert all(a.end <= b.begin + 1e-9 for a, b in itertools.pairwise(own))
            busy = sum(e.end - e.begin for e in timeline.events if (e.rank, e.lane) == (rank, "compute"))
            assert busy == pytest.approx(timeline.compute_us[timeline.kind[rank]])
    path = tmp_path / "trace.json"
    write_trace(timelines, path)
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == sum(len(timeline.events) for timeline in timelines)
    assert max(e["ts"] + e["dur"] for e in spans) <= sum(t.total_us for t in timelines) + 1e-6
    named = {(e["pid"], e["name"]) for e in trace_events(timelines) if e["ph"] == "M"}
    assert {pid for pid, _ in named} == {e["pid"] for e in spans}


def test_the_first_block_of_a_line_is_cheaper_than_one_that_adds() -> None:
    blocks = tuple(replace(b, merging=3 * b.forward, adding=5 * b.backward) for b in FLAT.blocks)
    topology = replace(cluster(), kernels=KernelTimes("uneven", blocks))
    times = block_times(topology.kernels, call(300))
    new, more = times["forward"][1], times["merging"][1]

    def kernels(direction: Direction, tile: Tile) -> float:
        script = pass_script(direction, call(300), Cut(1, tile), topology)
        return sum(float(str(e.us)) for e in script.entries if isinstance(e, Kernel) and not e.steady)

    assert kernels("forward", Tile(2, 3)) == pytest.approx(2 * new + 4 * more)
    new, more = times["backward"][1], times["adding"][1]
    for tile in (Tile(1, 6), Tile(6, 1)):
        assert kernels("backward", tile) == pytest.approx(new + 5 * more)


def played(gpus_per_node: int, tile: Tile, *entries: Entry, copy_engines: bool = False) -> list[float]:
    """When each rank ends; a GB/s is a thousand bytes a microsecond, latency 1, exchanges move 5000 bytes."""
    topology = cluster(gpus_per_node, inside=1.0, between=1.0, latency_us=1.0, copy_engines=copy_engines)
    topology = replace(topology, between=replace(topology.across, copy_engines=copy_engines))
    placement = Placement(Cut(1, tile), ("row", "col", "heads"), gpus_per_node)
    timeline = run(Script("by hand", placement, entries, shares=False), topology)
    return [timeline.end_us[kind] for kind in timeline.kind]


def only(number: int, axis: MeshAxis, offset: int, ranks: int, sender: int) -> Exchange:
    return Exchange(number, "x", axis, offset, 5000, tuple(rank == sender for rank in range(ranks)))


@pytest.mark.parametrize("gpus_per_node", [1, 3], ids=["across", "inside"])
def test_an_exchange_waits_for_both_ends_and_holds_both_up(gpus_per_node: int) -> None:
    work = Kernel("work", (1.0, 10.0, 2.0))
    # Rank 2 sends to rank 1, which comes to it at 10; rank 0 has no part in it.
    assert played(gpus_per_node, Tile(1, 3), work, only(0, "col", -1, 3, 2), Wait(0)) == [1.0, 16.0, 16.0]


SLOT: Slot = ("col", 1)


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


def test_the_first_chunk_of_each_head_group_waits_for_what_stood_there_before() -> None:
    topology, cut = cluster(16), Cut(2, Tile(1, 4))
    shape = call(30000, heads=8, kv_heads=8)
    assert num_groups(shape, cut, topology) > 1
    script = pass_script("forward", shape, cut, topology)
    made = [e.made for e in script.entries if isinstance(e, Exchange) and e.axis == "col"]
    assert made == [True, False, False] * num_groups(shape, cut, topology)


def test_chunks_of_a_chain_wait_for_slots_that_are_filled_again() -> None:
    topology, cut = cluster(16, copy_engines=True), Cut(1, Tile(1, 9))
    script = pass_script("forward", call(300), cut, topology)
    freed = [entry.slot for entry in script.entries if isinstance(entry, Free)]
    filled = [entry.slot for entry in script.entries if isinstance(entry, Exchange) and entry.slot]
    assert len(filled) == 8 and len(set(filled)) == 3 and len(freed) == 8 - 3 and set(freed) <= set(filled)
    held: set[Slot] = set()
    for entry in script.entries:
        if isinstance(entry, Exchange) and entry.slot:
            assert entry.slot not in held
            held.add(entry.slot)
        elif isinstance(entry, Free):
            held.remove(entry.slot)
    assert not any(
        isinstance(e, Free) for e in pass_script("forward", call(9), Cut(1, Tile(3, 3)), topology).entries
    )


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


def test_heads_go_in_groups_one_under_way_while_another_is_computed() -> None:
    shape = replace(call(40_000), heads=32, kv_heads=32)
    groups = head_groups(shape, 4)
    assert groups > 1
    script = pass_script("forward", shape, Cut(4, Tile(1, 2)), cluster(4))
    assert script.num_exchanges == groups * (2 * 3 + 1)
    taking = cluster(2, sm_share=0.1)
    assert num_groups(shape, Cut(4, Tile(1, 2)), taking) == 1 < num_groups(shape, Cut(2, Tile(1, 2)), taking)
    names = [e.name for e in script.entries if isinstance(e, Exchange)]
    assert names.index("heads inward", 3) < names.index("kv 1"), "the next group comes in first"
    assert run(script, cluster(4)).exposed_us < run(script, cluster(4, inside=1.0)).exposed_us


def test_parts_of_a_block_lie_between_nothing_and_all() -> None:
    times = [partial_us(part / 8, half=3.0, whole=10.0) for part in range(9)]
    assert times == sorted(times) and (times[0], times[4], times[8]) == (0, 3.0, 10.0)
    assert times[2] == 1.5 and times[6] == 6.5


def test_paces_follow_the_links() -> None:
    topology = cluster(4, inside=100.0, between=10.0)
    pace = pace_of(topology, Cut(1, Tile(4, 2)), ("row", "col", "heads"))
    assert (pace.row, pace.col, pace.channels) == (1, 10, "per_axis")
    pace = pace_of(topology, Cut(1, Tile(4, 2)), ("col", "row", "heads"))
    assert (pace.row, pace.col, pace.channels) == (10, 1, "per_axis")
    shared = replace(topology, gpus_per_nic=2)
    assert pace_of(shared, Cut(1, Tile(4, 2)), ("row", "col", "heads")).col == 20
    assert pace_of(topology, Cut(1, Tile(2, 2)), ("row", "col", "heads")).channels == "shared"


def test_programs_wait_for_all_that_they_start() -> None:
    script: Script = pass_script("backward", call(100), Cut(4, Tile(2, 3)), cluster())
    numbers = [entry.number for entry in script.entries if isinstance(entry, Exchange)]
    assert len(numbers) == len(set(numbers))
