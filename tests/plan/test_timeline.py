"""The emulator against bounds, hand formulas, and itself."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshattn.plan import Direction, Tile, payload_bytes
from meshattn.plan.block_cost import Mask, block_times
from meshattn.plan.cost import LONGER
from meshattn.plan.links import link_use
from meshattn.plan.passes import pass_script
from meshattn.plan.placement import Cut
from meshattn.plan.script import Exchange, Kernel, Wait
from meshattn.plan.timeline import run
from meshattn.plan.trace import trace_events, write_trace
from plan.emulation import CUTS, DIRECTIONS, emulate, triangle
from plan.topology_cases import call, cluster


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


def test_long_kernels_beside_such_exchanges_lose_in_proportion_to_the_exchange() -> None:
    """And not to themselves; nor do they end before it. If they leave it no room, all that it takes."""
    topology, shape = cluster(1, between=40.0, sm_share=0.1), call(500)
    script = pass_script("forward", shape, Cut(1, Tile(1, 2)), topology)
    (exchange,) = (each for each in script.entries if isinstance(each, Exchange))
    hop = exchange.num_bytes / 40e3
    for kernel, expected in ((20 * hop, 20 * hop + LONGER * 0.1 * hop), (hop / 9, hop)):
        entries = exchange, Kernel("block", kernel), Wait(exchange.number)
        timeline = run(replace(script, entries=entries, room="at first"), topology)
        assert timeline.total_us == pytest.approx(expected)
        timeline = run(replace(script, entries=entries, room="none"), topology)
        assert timeline.total_us == pytest.approx(kernel + hop)


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
