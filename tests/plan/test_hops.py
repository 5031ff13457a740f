"""Hops that carry nothing do not take place, on both of their ends; every other one does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshattn.plan import (
    Assignment,
    Axis,
    CallShape,
    Direction,
    Hops,
    Paths,
    Reach,
    Tile,
    Visibility,
    build,
    check,
    choose_tile,
    hops_of,
    payload_bytes,
    tiles,
    total_bytes,
)
from meshattn.plan.cost import message_bytes, reached_bytes
from meshattn.plan.hops import RINGS, Hop
from plan_cases import costs

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
AXES: tuple[Axis, Axis] = ("row", "col")
TURNED = [frozenset(axes) for axes in ((), ("row",), ("col",), AXES)]
PATHS = [
    *map(Paths, TURNED),
    *(Paths(direct=axes) for axes in TURNED[1:]),
    Paths(TURNED[1], TURNED[2]),
    Paths(TURNED[2], TURNED[1]),
]
EVERY_TILE = [tile for ranks in range(1, 10) for tile in tiles(ranks)]
SPOILT_TILES = [Tile(1, 4), Tile(4, 1), Tile(2, 3), Tile(3, 2)]


def random_facts(rng: random.Random, ranks: int) -> Visibility:
    """From nearly empty to nearly full."""
    density = rng.random()
    return Visibility(tuple(sum((rng.random() < density) << q for q in range(ranks)) for _ in range(ranks)))


def every_rank(tile: Tile, facts: Visibility, paths: Paths = RINGS) -> list[Hops]:
    return [hops_of(tile, rank, facts, paths) for rank in range(tile.ranks)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tile", EVERY_TILE, ids=lambda tile: f"P{tile.ranks}-{tile}")
def test_lists_are_right_for_any_facts(tile: Tile, direction: Direction) -> None:
    """The checker proves both directions: nothing that is used is missing, nothing moves in vain."""
    rng = random.Random(f"{tile} {direction}")
    for kind in ("mha", "gqa8-fp32"):
        for ratio in (0.1, 0.7):
            for paths in PATHS:
                schedule = build(direction, tile, costs(direction, kind, ratio), direct=paths.direct)
                check(schedule, random_facts(rng, tile.ranks), paths=paths)


@pytest.mark.parametrize("turned", TURNED, ids=lambda axes: "-".join(["turned", *sorted(axes)]))
@pytest.mark.parametrize("tile", EVERY_TILE, ids=lambda tile: f"P{tile.ranks}-{tile}")
def test_the_rule_in_words(tile: Tile, turned: frozenset[Axis]) -> None:
    """Follow every chunk and every line round its ring, rank after rank to the left of its owner."""
    rng = random.Random(f"words {tile}")
    assignment = Assignment(tile, turned)
    for _ in range(4):
        facts = random_facts(rng, tile.ranks)
        hops = every_rank(tile, facts, Paths(turned))
        for owner in range(tile.ranks):
            for axis in AXES:
                way = [assignment.neighbour(owner, axis, -m) for m in range(tile.size(axis))]
                if axis == "row":
                    works = [any(facts.sees(owner, q) for q in assignment.keys(rank)) for rank in way]
                else:
                    works = [any(facts.sees(p, owner) for p in assignment.queries(rank)) for rank in way]
                for k in range(1, len(way)):
                    inward: Hop = (axis, "inward", k)  # the chunk, to the k-th rank of its way
                    assert (inward in hops[way[k - 1]].sent) == any(works[k:])
                    assert (inward in hops[way[k]].received) == any(works[k:])
                    outward: Hop = (axis, "outward", k)  # the line, from the k-th rank on
                    then = way[(k + 1) % len(way)]
                    assert (outward in hops[way[k]].sent) == any(works[1 : k + 1])
                    assert (outward in hops[then].received) == any(works[1 : k + 1])


def test_all_hops_of_full_facts_and_none_of_empty_ones() -> None:
    for tile in EVERY_TILE:
        full, empty = Visibility.full(tile.ranks), Visibility((0,) * tile.ranks)
        for rank in range(tile.ranks):
            hops = hops_of(tile, rank, full)
            assert hops.sent == hops.received and len(hops.sent) == 2 * (tile.a - 1) + 2 * (tile.b - 1)
            assert hops_of(tile, rank, empty) == Hops(frozenset(), frozenset())


@pytest.mark.parametrize("tile", EVERY_TILE, ids=lambda tile: f"P{tile.ranks}-{tile}")
def test_the_rule_of_direct_axes_in_words(tile: Tile) -> None:
    """Everything goes from or to its owner at once, and only where there is a block to compute."""
    rng = random.Random(f"direct {tile}")
    assignment = Assignment(tile)
    for _ in range(4):
        facts = random_facts(rng, tile.ranks)
        hops = every_rank(tile, facts, Paths(direct=frozenset(AXES)))
        for owner in range(tile.ranks):
            for axis in AXES:
                for k in range(1, tile.size(axis)):
                    rank = assignment.neighbour(owner, axis, -k)
                    if axis == "row":
                        works = any(facts.sees(owner, q) for q in assignment.keys(rank))
                    else:
                        works = any(facts.sees(p, owner) for p in assignment.queries(rank))
                    for way, source, target in (("inward", owner, rank), ("outward", rank, owner)):
                        assert ((axis, way, k) in hops[source].sent) == works
                        assert ((axis, way, k) in hops[target].received) == works


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_way_that_moves_least_is_taken(direction: Direction) -> None:
    """Against all ways, counted hop by hop; the plain rings where nothing is saved."""
    rng = random.Random(f"paths {direction}")
    shape = CallShape(1, 8, 4, 2, 16, 8, 2, 4, 4, causal=True)
    for tile in EVERY_TILE:
        for facts in (Visibility.full(tile.ranks), *(random_facts(rng, tile.ranks) for _ in range(4))):
            reach = Reach(tile, facts)

            def moved(paths: Paths, tile: Tile = tile, reach: Reach = reach) -> int:
                return sum(
                    total_bytes(direction, tile, shape, reach.hops(rank, paths)) for rank in range(tile.ranks)
                )

            chosen = reach.paths(message_bytes(direction, shape))
            assert moved(chosen) == min(map(moved, PATHS)) == reached_bytes(direction, shape, reach)[0]
            if moved(RINGS) == moved(chosen):
                assert chosen == RINGS
            elif moved(Paths(chosen.turned)) == moved(chosen):
                assert not chosen.direct


def test_a_window_needs_one_hop_on_any_ring() -> None:
    """Contiguous chunks, each of which needs the keys of the one before: far on the left way, near on the
    right one."""
    for ranks in (3, 8, 64):
        facts = Visibility(tuple(1 << p | (1 << (p - 1) if p else 0) for p in range(ranks)))
        reach = Reach(Tile(1, ranks), facts)
        assert reach.num_hops("col", "inward") == (ranks - 1) ** 2
        turned = Paths(turned=frozenset(("col",)))
        assert reach.num_hops("col", "inward", turned) == ranks - 1
        shape = CallShape(1, 8, 4, 4, 16, 16, 2, 2, 2, causal=True)
        assert reach.paths(message_bytes("forward", shape)) == turned
        # Keys go one hop right and their gradients one hop back: no ring does both.
        assert reach.paths(message_bytes("backward", shape)) == Paths(direct=frozenset(("col",)))
        assert reached_bytes("backward", shape, reach)[1] == 2 * (ranks - 1)


def test_auto_counts_what_is_left() -> None:
    """A window of one chunk makes the ring best, where it is far from it without."""
    shape = CallShape(1, 64, 8, 2, 64, 64, 2, 4, 4, causal=True)
    window = Visibility(tuple(1 << p | (1 << (p - 1) if p else 0) for p in range(16)))
    assert choose_tile(16, shape) == choose_tile(16, shape, visibility=Visibility.full(16)) == Tile(2, 8)
    assert choose_tile(16, shape, visibility=window) == Tile(1, 16)
    moved = {
        tile: sum(reached_bytes(direction, shape, Reach(tile, window))[0] for direction in DIRECTIONS)
        for tile in tiles(16)
    }
    assert 3 * moved[Tile(1, 16)] < moved[Tile(2, 8)]


def test_own_blocks_alone_move_nothing() -> None:
    for tile in EVERY_TILE:
        own = Visibility(tuple(1 << p for p in range(tile.ranks)))
        assert not any(hops.sent for hops in every_rank(tile, own))


def test_facts_by_query_and_by_key_agree() -> None:
    facts = random_facts(random.Random(3), 7)
    for p in range(7):
        for q in range(7):
            assert facts.sees(p, q) == bool(facts.queries[q] >> p & 1)
            assert (
                facts.sees(p, q) == bool(facts.line("row", p) >> q & 1) == bool(facts.line("col", q) >> p & 1)
            )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tile", SPOILT_TILES, ids=str)
def test_one_end_that_differs_is_found(tile: Tile, direction: Direction) -> None:
    """Any hop of any rank taken away from, or given to, one of its ends alone."""
    schedule = build(direction, tile, costs(direction, "mha", 0.5))
    facts = random_facts(random.Random(f"ends {tile}"), tile.ranks)
    hops = every_rank(tile, facts)
    moved = {(t.axis, t.way, t.index) for t in schedule.transfers}
    for rank in range(tile.ranks):
        for hop in moved:
            for side in ("sent", "received"):
                spoilt = replace(hops[rank], **{side: getattr(hops[rank], side) ^ {hop}})
                with pytest.raises(AssertionError):
                    check(schedule, facts, [*hops[:rank], spoilt, *hops[rank + 1 :]])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tile", SPOILT_TILES, ids=str)
def test_needless_and_missing_hops_are_found(tile: Tile, direction: Direction) -> None:
    """Any hop taken away from, or given to, both of its ends: pairs match, and it is wrong all the same."""
    schedule = build(direction, tile, costs(direction, "mha", 0.5))
    facts = random_facts(random.Random(f"both {tile}"), tile.ranks)
    hops = every_rank(tile, facts)
    assignment = Assignment(tile)
    for t in schedule.transfers:
        for rank in range(tile.ranks):
            spoilt = list(hops)
            left = assignment.neighbour(rank, t.axis, -1)
            hop = (t.axis, t.way, t.index)
            spoilt[rank] = replace(spoilt[rank], sent=spoilt[rank].sent ^ {hop})
            spoilt[left] = replace(spoilt[left], received=spoilt[left].received ^ {hop})
            with pytest.raises(AssertionError):
                check(schedule, facts, spoilt)


def test_bytes_are_those_of_the_hops_that_take_place() -> None:
    shape = CallShape(2, 9, 4, 2, 16, 8, 2, 4, 4, causal=True, key_rows=5)
    tile = Tile(3, 2)
    facts = random_facts(random.Random(5), tile.ranks)
    for rank in range(tile.ranks):
        hops = hops_of(tile, rank, facts)
        for direction in DIRECTIONS:
            schedule = build(direction, tile, costs(direction, "mha", 0.5))
            sent = [payload_bytes(t.payload, shape) for t in schedule.transfers if hops.sends(t)]
            assert total_bytes(direction, tile, shape, hops) == sum(sent)
