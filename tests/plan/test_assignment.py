"""The assignment matrix: coverage, groups, rings and local numbers, for every tile."""

from __future__ import annotations

import re
from itertools import product

import pytest

from meshattn.plan import Assignment, Tile, tiles

EVERY_TILE = [tile for ranks in range(1, 37) for tile in tiles(ranks)]
SMALL = [tile for tile in EVERY_TILE if tile.ranks <= 24]

all_tiles = pytest.mark.parametrize(
    "some",
    [SMALL, EVERY_TILE[len(SMALL) :], [Tile(8, 8), Tile(1, 61), Tile(61, 1), Tile(8, 16)]],
    ids=["P1-24", "P25-36", "P61-128"],
)


def test_tiles_are_all_factor_pairs() -> None:
    for ranks in range(1, 200):
        pairs = [(a, b) for a, b in product(range(1, ranks + 1), repeat=2) if a * b == ranks]
        assert [(tile.a, tile.b) for tile in tiles(ranks)] == pairs


def test_prime_has_the_two_rings_only() -> None:
    assert tiles(31) == (Tile(1, 31), Tile(31, 1))


@all_tiles
def test_blocks_are_covered_once_by_tiles_that_hold_the_own_block(some: list[Tile]) -> None:
    for tile in some:
        plan = Assignment(tile)
        plan.check()
        count: dict[int, int] = {}
        for p, line in enumerate(plan.matrix()):
            for q, rank in enumerate(line):
                count[rank] = count.get(rank, 0) + 1
                assert p in plan.queries(rank) and q in plan.keys(rank)
        assert count == dict.fromkeys(range(tile.ranks), tile.ranks)
        assert all(plan.owner(i, i) == i for i in range(tile.ranks))


@all_tiles
def test_groups_partition_the_ranks_and_meet_in_one(some: list[Tile]) -> None:
    for tile in some:
        plan = Assignment(tile)
        ranks = range(tile.ranks)
        for group, size in ((plan.row_group, tile.a), (plan.col_group, tile.b)):
            assert all(len(group(i)) == size and i in group(i) for i in ranks)
            assert all(group(j) == group(i) for i in ranks for j in group(i))
        assert all(set(plan.row_group(i)) & set(plan.col_group(i)) == {i} for i in ranks)
        for i in ranks:
            assert all(plan.queries(j) == plan.queries(i) for j in plan.row_group(i))
            assert all(plan.keys(j) == plan.keys(i) for j in plan.col_group(i))
            assert plan.row_group(i)[plan.col_index(i)] == i
            assert plan.col_group(i)[plan.row_index(i)] == i


@all_tiles
def test_local_number_k_is_the_own_chunk_of_the_kth_neighbour(some: list[Tile]) -> None:
    for tile in some:
        plan = Assignment(tile)
        for i in range(tile.ranks):
            row, col = plan.row_group(i), plan.col_group(i)
            for k in range(tile.a):
                assert (
                    plan.query_chunk(i, k) == row[(row.index(i) + k) % tile.a] == plan.neighbour(i, "row", k)
                )
            for k in range(tile.b):
                assert plan.key_chunk(i, k) == col[(col.index(i) + k) % tile.b] == plan.neighbour(i, "col", k)
            assert plan.query_chunk(i, 0) == plan.key_chunk(i, 0) == i
            # What this rank calls #k, its left neighbour calls #(k+1): so a chunk keeps moving left.
            left = plan.neighbour(i, "row", -1), plan.neighbour(i, "col", -1)
            assert all(plan.query_chunk(i, k) == plan.query_chunk(left[0], k + 1) for k in range(tile.a))
            assert all(plan.key_chunk(i, k) == plan.key_chunk(left[1], k + 1) for k in range(tile.b))


def test_published_example_of_nine_ranks() -> None:
    """Figure 1 of the paper: rank 3 of a 3x3 tile fetches Q4, Q5, KV0 and KV6."""
    plan = Assignment(Tile(3, 3))
    assert plan.queries(3) == (3, 4, 5)
    assert plan.keys(3) == (0, 3, 6)


def test_ring_attention_is_the_tile_of_one_query_chunk() -> None:
    plan = Assignment(tiles(7)[0])
    assert plan.matrix() == tuple((p,) * 7 for p in range(7))


def test_picture_shows_each_cell_of_the_matrix() -> None:
    plan = Assignment(Tile(2, 3))
    lines = [line for line in plan.picture().splitlines() if line.lstrip().startswith("Q")]
    shown = tuple(tuple(map(int, re.findall(r"\d+", line.partition("|")[2]))) for line in lines)
    assert shown == plan.matrix()
    assert all(f"[{i}]" in line for i, line in enumerate(lines))


@pytest.mark.parametrize("text", ["4", "2x", "x2", "2x-1", "axb", "2x2x2", "1.5x2", ""])
def test_parse_refuses_what_is_not_a_tile(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        Tile.parse(text)


def test_parse_reads_what_str_writes() -> None:
    assert all(Tile.parse(str(tile)) == tile for tile in EVERY_TILE)


@pytest.mark.parametrize("ranks", [0, -3])
def test_mesh_needs_a_rank(ranks: int) -> None:
    with pytest.raises(ValueError, match=str(ranks)):
        tiles(ranks)


def test_tile_needs_both_sides() -> None:
    with pytest.raises(ValueError, match="0x4"):
        Tile(0, 4)


def test_check_finds_a_wrong_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Assignment, "owner", lambda self, p, q: (p // self.tile.a) * self.tile.a)
    with pytest.raises(AssertionError, match="owner"):
        Assignment(Tile(2, 3)).check()
