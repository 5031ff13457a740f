"""The own block in two parts of some heads each: when it is cut, and the same results."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from distributed import check_cases
from mask_cases import mask_cases
from mesh_cases import Case
from meshattn.plan import CallShape, Costs, Direction, Tile, build, check, makespan, tiles
from meshattn.plan.cost import NOMINAL, Pace, costs

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
ROUTE = importlib.import_module("meshattn.plan.route")  # the name is that of its function too
LONG = CallShape(1, 8192, 16, 16, 128, 128, itemsize=2, reduce_itemsize=4, acc_itemsize=4, causal=True)
SHORT = replace(LONG, rows=64)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_lists_with_a_cut_block_are_right_and_never_longer(direction: Direction) -> None:
    for ranks in range(2, 13):
        for tile in tiles(ranks):
            for scale in (1, 8, 64):
                whole = Costs(block=50 * scale, row_in=100, col_in=130, row_out=200, col_out=270)
                cost = replace(whole, cut=1)
                schedule = build(direction, tile, cost)
                check(schedule)
                assert makespan(schedule, cost) <= makespan(build(direction, tile, whole), whole)


def test_a_long_backward_hides_its_first_and_its_last_transfer() -> None:
    cost = costs("backward", LONG)
    schedule = build("backward", Tile(1, 2), cost)
    assert makespan(schedule, cost) == cost.block + 2 * cost.of_block(2)
    assert [b.parts for s in schedule.steps if s.transfers for b in s.blocks] == [2, 2]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_short_blocks_and_those_with_nothing_to_hide_stay_whole(direction: Direction) -> None:
    one_head = replace(LONG, kv_heads=1)
    for tile, shape in ((Tile(1, 1), LONG), (Tile(1, 2), SHORT), (Tile(2, 2), SHORT), (Tile(1, 2), one_head)):
        blocks = build(direction, tile, costs(direction, shape)).blocks
        assert len(blocks) == tile.ranks and {b.parts for b in blocks} == {1}


@pytest.fixture
def all_cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small blocks count as long ones, and a cut as free."""

    def long(direction: Direction, shape: CallShape, pace: Pace = NOMINAL) -> Costs:
        cost = costs(direction, shape, pace)
        block = 4 * max(cost.row_in, cost.col_in, cost.row_out, cost.col_out)
        return replace(cost, block=block, cut=cost.cut and 0)

    monkeypatch.setattr(ROUTE, "costs", long)
    ROUTE.route.cache_clear()
    yield
    ROUTE.route.cache_clear()


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(mask_cases(longest=23))
def test_any_mask_with_cut_blocks(all_cut: None, case: Case) -> None:
    check_cases([case])
