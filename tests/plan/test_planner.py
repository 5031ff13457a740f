"""The planner: its order, its pruning, its cap, and what auto takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshattn.plan import Tile, choose_tile, tiles
from meshattn.plan.block_cost import Mask
from meshattn.plan.cost import total_bytes
from meshattn.plan.heads import exchange, inner_shape
from meshattn.plan.kernel_times import KernelTimes
from meshattn.plan.placement import ORDER, Cut, Placement, order_of, rank_order
from meshattn.plan.planner import BOTH, Question, choose, cuts, plan
from meshattn.plan.prediction import why
from meshattn.plan.topology import load_topology
from plan.topology_cases import FLAT, call, cluster


def question(ranks: int = 12, *, gpus_per_node: int = 4, between: float = 10.0, **shape: int) -> Question:
    return Question(ranks, call(700, **shape), cluster(gpus_per_node, between=between, latency_us=2.0))


@pytest.mark.parametrize("between", [0.5, 10.0, 1000.0])
def test_pruning_changes_neither_the_best_nor_the_order(between: float) -> None:
    asked = question(between=between)
    every = [asked.predict(cut, order) for cut in cuts(12, asked.shape) for order in cut.orders(4)]
    found = plan(asked, at_least=3)
    assert [each.total_us for each in found] == sorted(each.total_us for each in found)
    best = {cut: min(each.total_us for each in every if each.cut == cut) for cut in cuts(12, asked.shape)}
    assert [each.total_us for each in found[:3]] == sorted(best.values())[:3]
    assert len({each.cut for each in found}) == len(found)
    assert all(each.bound_us <= each.total_us * (1 + 1e-9) for each in every)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(("latency_us", "start_us"), [(50.0, 0.0), (0.0, 50.0), (40.0, 50.0)])
@pytest.mark.parametrize("gpus_per_node", [3, 12])
def test_waits_and_the_host_bound_what_a_short_call_takes(
    gpus_per_node: int, latency_us: float, start_us: float, masked: bool
) -> None:
    """So that few cuts of it are emulated; no bound is above the time of any."""

    def triangle(heads: int) -> Mask:
        return Mask(12 // heads, lambda p, q: 1.0 if q < p else 0.5 if q == p else 0.0)

    topology = cluster(gpus_per_node, latency_us=latency_us, start_us=start_us)
    asked = Question(12, call(3), topology, mask=triangle if masked else None)
    every = [
        asked.predict(cut, order) for cut in cuts(12, asked.shape) for order in cut.orders(gpus_per_node)
    ]
    assert all(each.bound_us <= each.total_us * (1 + 1e-9) for each in every)
    said: list[str] = []
    plan(asked, at_least=1, say=said.append)
    if start_us or not masked:  # a mask may leave out what is waited for
        assert len(said) < len(every)


def test_ring_and_ulysses_are_always_there() -> None:
    found = plan(question(8, gpus_per_node=4), at_least=1)
    assert (
        [each.is_ring for each in found].count(True) == 1 == [each.is_ulysses for each in found].count(True)
    )
    assert {each.name for each in found} >= {"1x1x8 (ring)", "8x1x1 (Ulysses)"}


def test_figures_are_those_of_the_formulas() -> None:
    for each in plan(question(12)):
        inner = inner_shape(call(700), each.cut.heads) if each.cut.heads > 1 else call(700)
        sent = sum(total_bytes(direction, each.cut.tile, inner) for direction in BOTH)
        if each.cut.heads > 1:
            moved = (exchange(direction, call(700), each.cut.heads) for direction in BOTH)
            sent += sum(part.num_bytes for parts in moved for part in parts.values())
        assert each.links.rank == sent
        assert each.links.leaving <= 12 * sent
        assert each.total_us == pytest.approx(each.compute_us + each.exposed_us, rel=1e-6)


def test_a_cap_on_memory_leaves_the_smaller_ones() -> None:
    asked = question(12)
    free = plan(asked, at_least=99)
    cap = sorted(each.memory for each in free)[len(free) // 3]
    kept = plan(asked, memory_limit=cap, at_least=99)
    assert {each.cut for each in kept} == {each.cut for each in free if each.memory <= cap}
    with pytest.raises(
        ValueError, match="the memory limit is 100 bytes, but the buffers of a rank and its kernel take"
    ):
        plan(asked, memory_limit=100)


def test_memory_counts_what_the_kernel_keeps_for_itself() -> None:
    """In the backward alone: of the blocks that a cut is made of."""
    blocks = tuple(replace(block, workspace=100 * block.rows * block.heads) for block in FLAT.blocks)
    topology = replace(cluster(4), kernels=KernelTimes("greedy", blocks))
    for passes in (BOTH, BOTH[:1]):
        free, full = (Question(12, call(700), which, passes) for which in (cluster(4), topology))
        for cut in cuts(12, call(700)):
            inner = full.inner(cut)
            own = 100 * inner.chunk_keys * inner.heads
            assert full.workspace(cut) == own and free.workspace(cut) == 0
            more = full.memory(cut) - free.memory(cut)
            assert more <= (own if "backward" in passes else 0)
            if cut.heads == 1:  # its backward needs more than its forward
                assert more == (own if "backward" in passes else 0)
    ring = Cut(1, Tile(1, 12))
    assert full.predict(ring).workspace == 0 < replace(full, passes=BOTH).predict(ring).workspace


@pytest.mark.parametrize("kernels", [FLAT, load_topology("dgx-h200").kernels], ids=["flat", "h200"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_that_leaves_as_much_of_every_block_plans_as_none(causal: bool, kernels: KernelTimes) -> None:
    """All figures, of every cut and placement: each rank is followed then, and every byte counted."""
    shape = replace(call(700), causal=causal)

    def mask(heads: int) -> Mask:
        return Mask(12 // heads, lambda p, q: 0.5 if causal else 1.0)

    topology = cluster(4, between=3.0, latency_us=2.0, gpus_per_nic=2, copy_engines=True)
    topology = replace(topology, kernels=kernels)
    plain, masked = (Question(12, shape, topology, mask=which) for which in (None, mask))
    for cut in cuts(12, shape):
        for order in cut.orders(4)[-1:]:
            a, b = plain.predict(cut, order), masked.predict(cut, order)
            assert a.links == b.links and a.memory == b.memory and a.exchanges == b.exchanges
            for name in ("total_us", "kernels_us", "compute_us", "exposed_us"):
                assert getattr(b, name) == pytest.approx(getattr(a, name), abs=1e-6), name


def test_a_mask_that_leaves_blocks_out_is_planned_as_far_as_it_goes() -> None:
    """Contiguous chunks under a causal mask: the busiest rank of a ring computes all, the first one block;
    what nobody needs is not sent."""

    def triangle(heads: int) -> Mask:
        return Mask(8 // heads, lambda p, q: 1.0 if q < p else 0.5 if q == p else 0.0)

    plain = Question(8, call(700), cluster(4, between=3.0))
    masked = replace(plain, mask=triangle)
    ring = Cut(1, Tile(1, 8))
    full = plain.kernels_us(ring)
    assert masked.kernels_us(ring) == pytest.approx(full * 7.5 / 8)
    for each in plan(masked, at_least=99):
        same = plain.predict(each.cut, each.order)
        assert each.links.rank <= same.links.rank
        assert each.bound_us <= each.total_us <= same.total_us * (1 + 1e-9)
        assert each.total_us == pytest.approx(each.kernels_us + each.other_us + each.exposed_us)
    (found,) = (each for each in plan(masked) if each.cut == ring)
    assert found.links.leaving < plain.links(ring, found.order).leaving


def test_why_names_what_wins() -> None:
    ring = question(4, gpus_per_node=8, between=1e4, heads=7, kv_heads=7)
    assert why(plan(ring)).startswith("plain ring is best here" if plan(ring)[0].is_ring else "1x")
    ulysses = plan(question(8, gpus_per_node=8, heads=8, kv_heads=8))
    assert ulysses[0].is_ulysses == why(ulysses).startswith("Ulysses is best here")
    alone = plan(Question(1, call(64), cluster()))
    assert "no other cut to choose from" in why(alone)


def test_why_says_what_the_next_cut_and_the_ring_lose() -> None:
    found = plan(question(16, between=1.0, heads=8, kv_heads=8))
    best, following = found[0], next(each for each in found if each.cut != found[0].cut)
    ring = next(each for each in found if each.is_ring)
    _, *against = why(found).split("; ")
    assert [text.split(" takes ")[0] for text in against] == [following.name, ring.name]
    assert f"takes {ring.total_us / best.total_us:.2f} times as long" in against[1]
    assert f"it waits {ring.exposed_us / 1e3:.1f} instead of {best.exposed_us / 1e3:.1f} ms" in against[1]
    assert ring.links.card > best.links.card and "busiest network card" in against[1]


def test_short_calls_wait_for_the_host() -> None:
    """Which queues a block for every rank of a ring, and fewer where heads are shared out."""
    asked = Question(12, call(3), cluster(12, start_us=20.0))
    found = plan(asked, at_least=99)
    assert {each.limit for each in found} == {"host"} and not found[0].is_ring
    assert "for the host to queue its blocks and exchanges" in why(found).split("; ")[-1]
    assert not any("host" in each.limit for each in plan(replace(asked, topology=cluster(12)), at_least=99))


def test_every_placement_of_a_cut_has_a_line_if_wanted() -> None:
    asked = question(12)
    every = {(cut, order) for cut in cuts(12, asked.shape) for order in cut.orders(4)}
    found = plan(asked, at_least=len(every), placements=True)
    assert {(each.cut, each.order) for each in found} == every and len(found) == len(every)
    assert [each.total_us for each in found] == sorted(each.total_us for each in found)
    best = {each.cut: each for each in reversed(found)}
    assert sorted(best.values(), key=found.index) == plan(asked, at_least=len(every))


def test_slow_links_between_nodes_keep_heads_or_rows_inside() -> None:
    best = plan(question(16, gpus_per_node=4, between=1.0, heads=4, kv_heads=4))[0]
    assert "inside a node" in best.where


@pytest.mark.parametrize("ranks", [1, 6, 8, 12])
def test_auto_without_a_topology_takes_the_fewest_bytes(ranks: int) -> None:
    shape = call(101, heads=6, kv_heads=6)
    assert choose(ranks, shape) == Cut(1, choose_tile(ranks, shape))
    cut = choose(ranks, shape, heads=None)

    def moved(cut: Cut) -> int:
        inner = inner_shape(shape, cut.heads) if cut.heads > 1 else shape
        sent = sum(total_bytes(direction, cut.tile, inner) for direction in BOTH)
        if cut.heads == 1:
            return sent
        parts = (exchange(direction, shape, cut.heads) for direction in BOTH)
        return sent + sum(part.num_bytes for each in parts for part in each.values())

    assert moved(cut) == min(moved(each) for each in cuts(ranks, shape))


def test_auto_with_a_topology_takes_the_least_time_in_the_own_order() -> None:
    asked = question(12)
    cut = choose(12, asked.shape, heads=None, topology=asked.topology)
    times = {each: asked.predict(each, ORDER).total_us for each in cuts(12, asked.shape)}
    assert times[cut] == min(times.values())
    ring = choose(12, asked.shape, tile=Tile(1, 12), topology=asked.topology)
    assert ring == Cut(1, Tile(1, 12))


def test_auto_with_a_given_head_axis_or_tile() -> None:
    shape = call(64, heads=8, kv_heads=2)
    assert choose(12, shape, heads=2).heads == 2
    assert choose(12, shape, heads=None, tile=Tile(3, 2)) == Cut(2, Tile(3, 2))
    for wrong, said in (
        ({"heads": 3}, "heads=3: the ranks of the head axis must divide them and the 8 heads"),
        ({"tile": Tile(5, 1)}, "tile 5x1 takes 5 ranks, which do not divide the 12"),
        ({"heads": 2, "tile": Tile(4, 1)}, "heads=2 beside tile 4x1"),
    ):
        with pytest.raises(ValueError, match=said):
            choose(12, shape, **wrong)  # type: ignore[arg-type]


def test_all_cuts_multiply_to_the_ranks() -> None:
    every = list(cuts(24, call(9, heads=6)))
    assert len(set(every)) == len(every) == sum(len(tiles(24 // w)) for w in (1, 2, 3, 6))
    assert all(cut.ranks == 24 and 6 % cut.heads == 0 for cut in every)


def test_a_group_puts_the_axes_where_the_planner_wants_them() -> None:
    for cut in (Cut(2, Tile(3, 4)), Cut(4, Tile(1, 3)), Cut(1, Tile(2, 6))):
        for order in cut.orders(4):
            group = rank_order(cut.heads, cut.tile, order)
            assert sorted(group) == list(range(cut.ranks)) and order_of(cut, [g + 5 for g in group]) == order
            placement = Placement(cut, order, 4)
            for position, rank in enumerate(group):
                chunk, head = divmod(position, cut.heads)
                assert placement.chunk(rank) == chunk and placement.coordinate(rank, "heads") == head
    assert rank_order(2, "3x4", ("heads", "row", "col")) == list(range(24))
    with pytest.raises(ValueError, match="names heads, row and col"):
        rank_order(2, "3x4", ("row", "row"))
    with pytest.raises(ValueError, match="heads is 0"):
        rank_order(0, "3x4", ("row", "col"))


def test_a_topology_of_one_node_plans_that_node_alone() -> None:
    alone = replace(cluster(4), between=None)
    assert plan(Question(4, call(64), alone))[0].links.card == 0
    with pytest.raises(ValueError, match="no link between nodes: plan at most the 4 ranks"):
        plan(Question(8, call(64), alone))
