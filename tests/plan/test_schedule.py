"""Step lists: the proof holds for every tile, and the lists have the promised form."""

from __future__ import annotations

from itertools import product

import pytest

from meshattn.plan import Channels, Costs, Direction, Schedule, Slots, Tile, build, check, makespan, tiles
from meshattn.plan.greedy import best_order
from meshattn.plan.schedule import payloads
from plan_cases import KINDS, RATIOS, costs

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
CHANNELS: tuple[Channels, Channels] = ("shared", "per_axis")
SMALL = [tile for ranks in range(1, 13) for tile in tiles(ranks)]
MIDDLE = [tile for ranks in range(13, 37) for tile in tiles(ranks)]
MIDDLE_BY_RANKS = {ranks: [tile for tile in MIDDLE if tile.ranks == ranks] for ranks in range(13, 37)}
LARGE = [Tile(1, 61), Tile(61, 1), Tile(4, 16), Tile(16, 16)]

each_direction = pytest.mark.parametrize("direction", DIRECTIONS)
each_small_tile = pytest.mark.parametrize("tile", SMALL, ids=str)


def lists(direction: Direction, tile: Tile, ratios: tuple[float, ...] = (0.1, 0.7, 2.0)) -> list[Schedule]:
    return [
        build(direction, tile, costs(direction, kind, ratio), channels)
        for kind, ratio, channels in product(("mha", "gqa8-fp32"), ratios, CHANNELS)
    ]


@each_direction
@each_small_tile
def test_every_list_of_a_small_tile_is_proved(tile: Tile, direction: Direction) -> None:
    for kind, ratio, channels in product(("mha", "gqa8-fp32"), (0.05, 0.5, 2.0), CHANNELS):
        check(build(direction, tile, costs(direction, kind, ratio), channels))
    check(build(direction, tile, costs(direction, "mha", 0.5, merge=90)))


@each_direction
@pytest.mark.parametrize("some", [*MIDDLE_BY_RANKS.values(), LARGE], ids=lambda some: f"P{some[0].ranks}")
def test_lists_of_larger_tiles_are_proved(some: list[Tile], direction: Direction) -> None:
    for tile, channels in product(some, CHANNELS):
        check(build(direction, tile, costs(direction, "mha", 0.5), channels))


@pytest.mark.slow
@each_direction
@pytest.mark.parametrize("tile", MIDDLE + LARGE + list(tiles(64)) + list(tiles(256)), ids=str)
def test_every_list_of_larger_tiles_is_proved(tile: Tile, direction: Direction) -> None:
    for kind, ratio, channels in product(KINDS, RATIOS, CHANNELS):
        check(build(direction, tile, costs(direction, kind, ratio), channels))


@each_direction
def test_free_transfers_and_free_blocks_still_give_a_list(direction: Direction) -> None:
    for tile, cost in product(SMALL, (Costs(0, 0, 0, 0), Costs(5, 0, 0, 0), Costs(0, 3, 4, 5, 6, 7))):
        check(build(direction, tile, cost))


@each_direction
@each_small_tile
def test_cutting_into_steps_costs_no_time(tile: Tile, direction: Direction) -> None:
    """The waits of the list delay nothing: its time is that of the simulated order."""
    for kind, ratio, channels, merge in product(("mha", "gqa8"), (0.1, 1.4), CHANNELS, (0, 90)):
        cost = costs(direction, kind, ratio, merge)
        assert (
            makespan(build(direction, tile, cost, channels), cost, channels)
            == (best_order(direction, tile, cost, channels)[0])
        )


@each_direction
@each_small_tile
def test_lists_are_a_pure_function_of_their_arguments(tile: Tile, direction: Direction) -> None:
    cost = costs(direction, "mha", 0.7)
    assert build.__wrapped__(direction, tile, cost, "shared") == build(direction, tile, cost)
    doubled = costs(direction, "mha", 0.7)
    doubled = Costs(
        block=2 * doubled.block,
        row_in=2 * doubled.row_in,
        col_in=2 * doubled.col_in,
        row_out=2 * doubled.row_out,
        col_out=2 * doubled.col_out,
    )
    assert build(direction, tile, doubled) == build(direction, tile, cost), "the unit of the costs matters"


@each_direction
@each_small_tile
def test_steps_are_not_empty_and_transfers_keep_index_order(tile: Tile, direction: Direction) -> None:
    for schedule in lists(direction, tile):
        assert all(s.waits or s.merges or s.transfers or s.blocks for s in schedule.steps)
        assert [t.number for t in schedule.transfers] == list(range(len(schedule.transfers)))
        for payload in payloads(direction):
            indices = [t.index for t in schedule.transfers if t.payload == payload]
            size = tile.a if payload in ("q", "bundle", "out", "dq") else tile.b
            assert indices == list(range(1, size))


@each_direction
@each_small_tile
def test_waits_are_lazy(tile: Tile, direction: Direction) -> None:
    """A step waits only for what it uses: a block's chunk or slot, a merge, an onward send, or the end."""
    for schedule in lists(direction, tile):
        transfers = schedule.transfers
        for number, step in enumerate(schedule.steps):
            last = number == len(schedule.steps) - 1
            for waited in step.waits:
                t = transfers[waited]
                if t.inward:
                    lines = [b.row if t.axis == "row" else b.col for b in step.blocks]
                    onward = any(s.payload == t.payload and s.sent == t.received for s in step.transfers)
                    assert t.received in lines or onward or last
                else:
                    slots = [b.row_acc if t.axis == "row" else b.col_acc for b in step.blocks]
                    assert any(m.transfer == waited for m in step.merges) or t.send_slot in slots or last


@each_direction
def test_ring_keeps_three_chunks_however_long(direction: Direction) -> None:
    for ranks in (2, 3, 4, 5, 9, 33):
        ring = Slots.of(direction, Tile(1, ranks))
        assert (ring.row, ring.col) == (1, 1 + min(ranks - 1, 3))
        queries = Slots.of(direction, Tile(ranks, 1))
        assert (queries.row, queries.col, queries.row_acc) == (1 + min(ranks - 1, 3), 1, queries.row)


@each_direction
@each_small_tile
def test_slots_are_all_used(tile: Tile, direction: Direction) -> None:
    """The closed form promises no slot that no list needs."""
    for schedule in lists(direction, tile):
        slots = schedule.slots
        assert {b.row_slot for b in schedule.blocks} == set(range(slots.row))
        assert {b.col_slot for b in schedule.blocks} == set(range(slots.col))
        assert {b.row_acc for b in schedule.blocks} == set(range(slots.row_acc))
        outward = [t for t in schedule.transfers if not t.inward]
        assert {t.recv_slot for t in outward if t.axis == "row"} == set(range(slots.row_recv))
        assert {t.recv_slot for t in outward if t.axis == "col"} == set(range(slots.col_recv))


def test_one_rank_only_computes() -> None:
    for direction in DIRECTIONS:
        (step,) = build(direction, Tile(1, 1), costs(direction, "mha", 0.5)).steps
        assert (len(step.blocks), step.transfers, step.waits) == (1, (), ())


def test_ring_of_two_by_hand() -> None:
    """One KV chunk of 2000 arrives while block (0, 0) runs; block (0, 1) follows, nothing leaves."""
    cost = Costs(block=3000, row_in=1000, col_in=2000, row_out=1000)
    assert makespan(build("forward", Tile(1, 2), cost), cost) == 6000
    cost = Costs(block=500, row_in=1000, col_in=2000, row_out=1000)
    assert makespan(build("forward", Tile(1, 2), cost), cost) == 2500


def test_two_query_chunks_by_hand() -> None:
    """Q in 1000, its block 500, its partial out 1000, merged in 7; the own block fits anywhere."""
    cost = Costs(block=500, row_in=1000, col_in=2000, row_out=1000, merge=7)
    assert makespan(build("forward", Tile(2, 1), cost), cost) == 2507


def test_merge_time_counts() -> None:
    for direction, tile in product(DIRECTIONS, SMALL):
        free, paid = costs(direction, "mha", 2.0), costs(direction, "mha", 2.0, merge=300)
        times = [makespan(build(direction, tile, cost), cost) for cost in (free, paid)]
        assert times[1] > times[0] or (direction == "forward" and tile.a == 1) or tile.ranks == 1


def test_negative_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="row_in is -1"):
        Costs(block=1, row_in=-1, col_in=1, row_out=1)
