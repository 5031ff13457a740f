"""The head axis: every combination with a tile against the oracle, and the bits of the tile alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from cases import Shape
from distributed import assert_equals_oracle, assert_same_bits, check_cases, run_cases
from head_cases import GROUPED, SHAPE, Axes, axes_id, head_case
from mesh_cases import LAYOUTS, Case, Packed
from meshattn import calls, heads
from meshattn.plan.assignment import Tile, tiles
from meshattn.plan.cost import CallShape
from meshattn.plan.route import Route
from meshattn.plan.schedule import Direction

SMALL = [
    (2, 1, 1),
    (3, 1, 1),
    (2, 2, 1),
    (2, 1, 2),
    (4, 1, 1),
    (3, 2, 1),
    (3, 1, 2),
    (2, 1, 3),
    (2, 3, 1),
    (6, 1, 1),
]
LARGE = [(2, 2, 2), (4, 1, 2), (2, 4, 1), (12, 1, 1), (3, 2, 2), (4, 2, 2), (2, 2, 4)]


@pytest.mark.parametrize("axes", SMALL, ids=axes_id)
def test_every_axis_and_layout(axes: Axes) -> None:
    """Key/value heads that divide, that are copied, and copied unevenly: 12 query heads on 4."""
    check_cases(
        [
            head_case(axes, replace(SHAPE, S=seq_len), layout=layout, causal=causal)
            for seq_len, (layout, causal) in zip(
                (29, 5, 36, 30, 31, 1), itertools.product(LAYOUTS, (True, False)), strict=True
            )
        ]
    )


@pytest.mark.parametrize("axes", LARGE, ids=axes_id)
def test_larger_groups(axes: Axes) -> None:
    documents = Packed((0, 3, 3, 17, 40), (3, 0, 11, 23))
    shape = replace(SHAPE, S=43, S_k=37)
    check_cases(
        [
            head_case(axes, replace(shape, S_k=None), documents=documents, window_size=(7, -1)),
            head_case(axes, shape, layout="zigzag", kv_layout="contiguous", window_size=(9, 2), softcap=3.0),
        ]
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", range(2, 17), ids="P{}".format)
def test_every_factorisation(ranks: int) -> None:
    """Heads that the axis divides, and a key/value head for each, for all, and for every other one."""
    for w in (w for w in range(2, ranks + 1) if ranks % w == 0):
        for tile, kv_heads, layout, causal in itertools.product(
            tiles(ranks // w), {1, w, 2 * w}, LAYOUTS, (True, False)
        ):
            shape = Shape(B=2, S=3 * ranks + 2, H=2 * w, H_kv=kv_heads, D=8, D_v=16)
            check_cases([Case(tile, shape, layout, causal, heads=w)])


@pytest.mark.parametrize("axes", [(4, 1, 1), (2, 2, 1), (2, 1, 2)], ids=axes_id)
def test_over_processes(axes: Axes) -> None:
    """gloo against the oracle, with the bits of simulated ranks."""
    cases = [head_case(axes, layout=layout, head_groups=1) for layout in LAYOUTS]
    cases += [
        head_case(axes, dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        for reduce_dtype in (None, torch.bfloat16)
    ]
    for case, gloo, threads in zip(cases, run_cases(cases, "gloo"), run_cases(cases), strict=True):
        assert_equals_oracle(case, gloo)
        assert_same_bits(gloo, threads)


@pytest.mark.parametrize("axes", [(2, 1, 1), (2, 1, 2), (2, 2, 1)], ids=axes_id)
def test_groups_of_heads(axes: Axes) -> None:
    cases = [head_case(axes, GROUPED, head_groups=groups) for groups in (1, 2, 4)]
    check_cases([*cases, replace(cases[1], dropout_p=0.3, dropout_seed=7)])


@pytest.mark.parametrize("axes", [(2, 1, 1), (2, 1, 2), (2, 2, 2)], ids=axes_id)
def test_groups_change_no_bits(axes: Axes) -> None:
    """The order of blocks does not follow from the size of a group."""
    cases = [head_case(axes, GROUPED, dtype=torch.float32, head_groups=groups) for groups in (1, 2, 4)]
    one, two, four = run_cases(cases)
    assert_same_bits(one, two)
    assert_same_bits(one, four)


def test_lists_are_made_for_all_heads_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for a group of them, which may have another order of blocks."""
    asked: set[tuple[str, CallShape]] = set()
    route = calls.route

    def watched(direction: Direction, shape: CallShape, *rest: Any, **how: Any) -> Route:
        asked.add((direction, shape))
        return route(direction, shape, *rest, **how)

    monkeypatch.setattr(calls, "route", watched)
    run_cases([head_case((2, 1, 2), GROUPED, head_groups=groups) for groups in (1, 2, 4)])
    assert {shape.heads for _, shape in asked} == {GROUPED.H // 2}
    assert len(asked) == 2, "one shape for each pass"


def test_the_bits_are_those_of_the_tile_alone() -> None:
    """Rows and heads go to other ranks and back, the sums stay the same; so also on every run."""
    shape = replace(GROUPED, S=32)
    for tile, dtype in itertools.product((Tile(2, 2), Tile(1, 1)), (torch.float32, torch.bfloat16)):
        case = Case(tile, shape, dtype=dtype, heads=2, head_groups=1)
        (joined,), (again,), (alone,) = (run_cases([x]) for x in (case, case, replace(case, heads=1)))
        assert_same_bits(joined, again)
        for name in alone[0]._fields:
            rows = 2 if name == "lse" else 1
            for chunk, one in enumerate(alone):
                both = [getattr(joined[2 * chunk + place], name) for place in range(2)]
                assert torch.equal(torch.cat(both, rows), getattr(one, name)), name


def test_the_ring_keeps_the_head_axis() -> None:
    """It is the tile (1, P / heads) on the same mesh, with its bits."""
    ring = replace(head_case((2, 4, 1), dtype=torch.float32), ring=True)
    (mine,), (same,) = run_cases([ring]), run_cases([head_case((2, 1, 4), dtype=torch.float32)])
    assert_equals_oracle(ring, mine)
    assert_same_bits(mine, same)


def _keys_of_the_next_place(patch: pytest.MonkeyPatch) -> None:
    heads_of = heads.HeadCall.heads_of

    def mutant(self: heads.HeadCall, name: str, place: int, group: int) -> range:
        return heads_of(self, name, (place + (name in heads.KEYS)) % self.split.ranks, group)

    patch.setattr(heads.HeadCall, "heads_of", mutant)


def _swap_rows(patch: pytest.MonkeyPatch) -> None:
    some_rows = heads._some_rows
    patch.setattr(
        heads, "_some_rows", lambda call, x, place: some_rows(call, x, call.split.ranks - 1 - place)
    )


def _first_copy_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(heads, "_sum_of_copies", lambda call, x: x[:, :, :: call.split.copies].to(call.inner.dtype))


def _sum_all_copies_twice(patch: pytest.MonkeyPatch) -> None:
    total = heads._sum_of_copies
    patch.setattr(heads, "_sum_of_copies", lambda call, x: total(call, x) * min(2, call.split.copies))


MUTANTS = {
    "keys-of-the-next-place": (_keys_of_the_next_place, head_case((3, 1, 1), replace(SHAPE, H_kv=12))),
    "rows-of-another-place": (_swap_rows, head_case((2, 1, 1))),
    "one-copy-of-a-gradient": (_first_copy_alone, head_case((12, 1, 1))),
    "copies-summed-twice": (_sum_all_copies_twice, head_case((3, 1, 1))),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_comparison_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, case = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=r"error .* > |padding rows"):
        check_cases([case])
