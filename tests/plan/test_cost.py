"""Closed forms against the lists they describe, and the choice of the tile."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from meshattn.plan import (
    CallShape,
    Costs,
    Direction,
    Tile,
    build,
    choose_tile,
    costs,
    memory,
    num_hops,
    payload_bytes,
    peak_memory,
    tiles,
    total_bytes,
    traffic,
)
from plan_cases import costs as some_costs

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
SHAPES = {
    "bf16": CallShape(1, 128, 8, 8, 64, 64, itemsize=2, reduce_itemsize=2, acc_itemsize=4, causal=True),
    "gqa-fp32-reduce": CallShape(
        2, 33, 8, 2, 64, 96, itemsize=2, reduce_itemsize=4, acc_itemsize=4, causal=True
    ),
    "mqa-fp64": CallShape(3, 7, 5, 1, 17, 3, itemsize=8, reduce_itemsize=8, acc_itemsize=8, causal=False),
}
EVERY_TILE = [tile for ranks in range(1, 25) for tile in tiles(ranks)]

each_direction = pytest.mark.parametrize("direction", DIRECTIONS)
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@each_direction
@each_shape
def test_traffic_is_the_sum_over_the_transfers_of_the_list(shape: CallShape, direction: Direction) -> None:
    for tile in EVERY_TILE:
        counted = {(axis, way): [0, 0] for axis in ("row", "col") for way in ("inward", "outward")}
        for t in build(direction, tile, some_costs(direction, "mha", 0.5)).transfers:
            counted[t.axis, t.way][0] += payload_bytes(t.payload, shape)
            counted[t.axis, t.way][1] += 1
        planned = traffic(direction, tile, shape)
        assert {key: [part.num_bytes, part.num_messages] for key, part in planned.items()} == counted
        assert num_hops(direction, tile) == sum(part.num_messages for part in planned.values())


@each_shape
def test_total_bytes_is_the_published_formula(shape: CallShape) -> None:
    w, r, m = shape.itemsize, shape.reduce_itemsize, shape.acc_itemsize
    n = shape.batch * shape.rows * shape.heads
    n_kv = shape.batch * shape.rows * shape.kv_heads
    d, d_v = shape.head_dim, shape.head_dim_v
    for tile in EVERY_TILE:
        a, b = tile.a, tile.b
        forward = (a - 1) * n * (d * w + d_v * r + m) + (b - 1) * n_kv * (d + d_v) * w
        backward = (a - 1) * n * ((d + d_v) * w + d * r + 2 * m) + (b - 1) * n_kv * (d + d_v) * (w + r)
        assert total_bytes("forward", tile, shape) == forward
        assert total_bytes("backward", tile, shape) == backward


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_sixteen_bit_traffic_in_query_chunks(group: int) -> None:
    """2(a-1) + 2(b-1)/g and 3(a-1) + 4(b-1)/g query chunks, beside 4 bytes of lse or delta a row and head."""
    shape = CallShape(1, 64, 8, 8 // group, 128, 128, 2, 2, 4, causal=True)
    chunk, lse = payload_bytes("q", shape), shape.query_rows * 4
    for tile in EVERY_TILE:
        a, b = tile.a, tile.b
        forward = total_bytes("forward", tile, shape) - (a - 1) * lse
        backward = total_bytes("backward", tile, shape) - (a - 1) * 2 * lse
        assert forward * group == chunk * (2 * (a - 1) * group + 2 * (b - 1))
        assert backward * group == chunk * (3 * (a - 1) * group + 4 * (b - 1))


@each_direction
@each_shape
def test_memory_follows_the_slots_that_the_list_uses(shape: CallShape, direction: Direction) -> None:
    inward_row = payload_bytes("q" if direction == "forward" else "bundle", shape)
    wide = replace(shape, reduce_itemsize=shape.acc_itemsize)  # same numbers in the accumulator type
    for tile in EVERY_TILE:
        schedule = build(direction, tile, some_costs(direction, "mha", 0.5))
        rows = {b.row_slot for b in schedule.blocks}
        cols = {b.col_slot for b in schedule.blocks}
        need = memory(direction, tile, shape)
        # The own chunk of each axis lies where the caller has it; slots of the list count it.
        row_chunks, col_chunks = ((len(slots) - 1) for slots in (rows, cols))
        assert need.chunks == row_chunks * inward_row + col_chunks * payload_bytes("kv", shape)
        row_acc = payload_bytes("out" if direction == "forward" else "dq", wide)
        col_acc = payload_bytes("dkv", wide) if direction == "backward" else 0
        assert need.accumulators == len(rows) * row_acc + len(cols) * col_acc
        outward = {(t.payload, t.recv_slot) for t in schedule.transfers if not t.inward}
        assert need.receive == sum(payload_bytes(payload, shape) for payload, _ in outward)
        cast = {payload for payload, _ in outward} if shape.reduce_itemsize != shape.acc_itemsize else set()
        assert need.staging == sum(payload_bytes(payload, shape) for payload in cast)
        assert peak_memory(direction, tile, shape) == need.total


@each_direction
def test_ring_memory_does_not_grow_with_the_ranks(direction: Direction) -> None:
    shape = SHAPES["bf16"]
    assert peak_memory(direction, Tile(1, 8), shape) == peak_memory(direction, Tile(1, 500), shape)
    assert peak_memory(direction, Tile(2, 8), shape) < peak_memory(direction, Tile(2, 500), shape)


def test_costs_are_whole_numbers_in_the_proportions_of_the_work() -> None:
    shape = CallShape(1, 4096, 32, 32, 128, 128, 2, 2, 4, causal=False)
    forward, backward = (costs(direction, shape) for direction in DIRECTIONS)
    assert all(isinstance(getattr(forward, name), int) for name in Costs.__slots__)
    assert forward.block * 5 == pytest.approx(backward.block * 2, rel=1e-6)  # 2 matmuls against 5
    assert costs("forward", replace(shape, causal=True)).block * 2 == pytest.approx(forward.block, rel=1e-6)
    assert costs("forward", replace(shape, rows=2 * 4096)).block == pytest.approx(4 * forward.block, rel=1e-6)
    assert (forward.row_in, forward.col_in) == (payload_bytes("q", shape), payload_bytes("kv", shape))
    assert (forward.col_out, backward.col_out) == (0, payload_bytes("dkv", shape))
    assert costs("forward", CallShape(1, 1, 1, 1, 1, 1, 2, 2, 4, causal=True)).block == 1


def mha(**changes: int) -> CallShape:
    return replace(CallShape(1, 512, 32, 32, 128, 128, 2, 2, 4, causal=True), **changes)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 7, 12, 13, 36, 64, 97, 256], ids="P{}".format)
@each_shape
def test_chosen_tile_moves_the_least_bytes(shape: CallShape, ranks: int) -> None:
    def moved(tile: Tile) -> int:
        return sum(total_bytes(direction, tile, shape) for direction in DIRECTIONS)

    assert moved(choose_tile(ranks, shape)) == min(map(moved, tiles(ranks)))


def test_square_tiles_win_with_as_many_kv_heads() -> None:
    assert choose_tile(4, mha()) == Tile(2, 2)
    assert choose_tile(64, mha()) == Tile(8, 8)
    assert choose_tile(256, mha()) == Tile(16, 16)


def test_ring_wins_on_four_ranks_with_a_quarter_of_the_kv_heads() -> None:
    assert choose_tile(4, mha(kv_heads=8)) == Tile(1, 4)


def test_fewer_kv_heads_make_the_tile_longer() -> None:
    sides = [choose_tile(256, mha(kv_heads=kv_heads)).b for kv_heads in (32, 8, 2, 1)]
    assert sides == sorted(sides) and sides[0] < sides[-1]


def test_prime_ranks_pass_what_is_smaller() -> None:
    assert choose_tile(7, mha()) == Tile(7, 1)  # 5 query chunks a hop against 6
    assert choose_tile(7, mha(kv_heads=16)) == Tile(1, 7)


def test_equal_bytes_go_to_fewer_hops() -> None:
    """Sizes made so that a row hop moves as much as a column hop: then 4(a-1) + 3(b-1) hops decide."""
    shape = CallShape(1, 8, 2, 2, 1, 3, itemsize=2, reduce_itemsize=2, acc_itemsize=2, causal=True)
    row, col = (sum(total_bytes(d, tile, shape) for d in DIRECTIONS) for tile in (Tile(2, 1), Tile(1, 2)))
    assert row == col, "the sizes no longer tie as intended"
    assert choose_tile(6, shape) == Tile(2, 3)
    assert choose_tile(12, shape) == Tile(3, 4)
    assert choose_tile(7, shape) == Tile(1, 7)


def test_memory_limit_is_kept_or_named() -> None:
    shape = mha()

    def need(tile: Tile) -> int:
        return max(peak_memory(direction, tile, shape) for direction in DIRECTIONS)

    free = choose_tile(64, shape)
    assert choose_tile(64, shape, memory_limit=need(free)) == free
    tighter = choose_tile(64, shape, memory_limit=need(free) - 1)
    assert need(tighter) < need(free)
    smallest = min(map(need, tiles(64)))
    assert need(choose_tile(64, shape, memory_limit=smallest)) == smallest
    with pytest.raises(ValueError, match=re.escape(f"at least {smallest} bytes")):
        choose_tile(64, shape, memory_limit=smallest - 1)


@pytest.mark.parametrize("field", ["batch", "rows", "heads", "kv_heads", "head_dim", "itemsize"])
def test_empty_shapes_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0"):
        mha(**{field: 0})


def test_every_direction_and_axis_is_named() -> None:
    for direction, tile in product(DIRECTIONS, (Tile(1, 1), Tile(2, 3))):
        assert set(traffic(direction, tile, SHAPES["bf16"])) == set(
            product(("row", "col"), ("inward", "outward"))
        )
