"""The results of the public calls equal dense attention in float64, for every tile, layout and length."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator

import pytest
import torch

from cases import Results, Shape
from distributed import assemble, assert_same_bits, check_cases, run_cases
from mesh_cases import LAYOUTS, SMALL, Case, oracle, with_length
from meshattn.layouts import LayoutKind
from meshattn.plan.assignment import Tile, tiles

SMALL_TILES = [tile for ranks in (1, 2, 3, 4) for tile in tiles(ranks)]
LARGER_RANKS = (5, 6, 8, 12, 16)
ODD_SHAPES = [
    Shape(B=2, S=13, H=8, H_kv=2, D=8),
    Shape(B=1, S=19, H=6, H_kv=1, D=16, D_v=8),
    Shape(B=3, S=11, H=5, H_kv=5, D=8, D_v=24),
]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", SMALL_TILES, ids=lambda tile: f"P{tile.ranks}-{tile}")
def test_every_length(tile: Tile, layout: LayoutKind, causal: bool) -> None:
    """S from 1, where most ranks hold padding alone, to beyond four rows a rank."""
    check_cases(
        [
            Case(tile, with_length(SMALL, seq_len), layout, causal, seed=seq_len)
            for seq_len in range(1, 4 * tile.ranks + 4)
        ]
    )


def _sample(ranks: int, count: int = 12) -> list[Case]:
    """Seeded cases over all tiles of P, among them odd lengths of many rows a rank."""
    chosen = random.Random(ranks)
    every = itertools.cycle(tiles(ranks))
    cases = []
    for number in range(count):
        seq_len = chosen.randrange(1, 4 * ranks + 4) if number % 3 else 2 * chosen.randrange(60, 120) + 1
        heads, kv_heads = chosen.choice([(1, 1), (2, 1), (3, 3), (4, 2)])
        shape = Shape(B=1, S=seq_len, H=heads, H_kv=kv_heads, D=8)
        cases.append(Case(next(every), shape, chosen.choice(LAYOUTS), chosen.random() < 0.5, seed=number))
    return cases


@pytest.mark.parametrize("ranks", LARGER_RANKS, ids="P{}".format)
def test_sample_of_larger_groups(ranks: int) -> None:
    cases = _sample(ranks)
    assert {case.tile for case in cases} == set(tiles(ranks)), "every tile occurs"
    check_cases(cases)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "tile",
    [tile for ranks in LARGER_RANKS for tile in tiles(ranks)],
    ids=lambda tile: f"P{tile.ranks}-{tile}",
)
def test_every_length_of_larger_groups(tile: Tile, layout: LayoutKind, causal: bool) -> None:
    lengths = [*range(1, 4 * tile.ranks + 4), 257]
    check_cases([Case(tile, with_length(SMALL, n), layout, causal, seed=n) for n in lengths], timeout=3000)


@pytest.fixture
def _calm_threads() -> Iterator[None]:
    """Hundreds of waiting threads spend half of the time on asking for the interpreter lock."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    "case",
    [
        Case(Tile(8, 8), with_length(SMALL, 131), "striped"),
        Case(Tile(4, 16), with_length(SMALL, 63), "zigzag", causal=False),
        Case(Tile(16, 16), with_length(SMALL, 83), "contiguous"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("_calm_threads")
def test_many_ranks(case: Case) -> None:
    check_cases([case], timeout=110)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "case",
    [
        Case(Tile(1, 64), with_length(SMALL, 67), "striped"),
        Case(Tile(64, 1), with_length(SMALL, 67), "contiguous"),
        Case(Tile(1, 256), with_length(SMALL, 251), "striped"),
        Case(Tile(8, 32), with_length(SMALL, 517), "zigzag"),
        Case(Tile(16, 16), with_length(SMALL, 251), "contiguous"),
        Case(Tile(16, 16), with_length(SMALL, 1021), "striped", causal=False),
    ],
    ids=str,
)
@pytest.mark.usefixtures("_calm_threads")
def test_many_ranks_and_long_chains(case: Case) -> None:
    check_cases([case], timeout=1100)


@pytest.mark.parametrize("tile", [Tile(1, 1), Tile(1, 3), Tile(2, 2), Tile(3, 2)], ids=str)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_heads_and_sizes(shape: Shape, tile: Tile) -> None:
    """GQA, MQA, heads that P does not divide, D_v other than D, several batches; a softmax scale."""
    check_cases(
        [
            Case(tile, shape, layout, causal, softmax_scale=scale)
            for layout, causal, scale in [
                ("striped", True, None),
                ("zigzag", False, 0.2),
                ("contiguous", True, 3.0),
            ]
        ]
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6], ids="P{}".format)
def test_ring_attention_is_the_tile_1xP_bit_for_bit(ranks: int) -> None:
    """Whatever the tile of its mesh: here the ring runs on the last tile, (P, 1)."""
    shape = Shape(B=2, S=4 * ranks + 3, H=4, H_kv=2, D=8)
    for dtype in (torch.float64, torch.bfloat16):
        mesh_case = Case(Tile(1, ranks), shape, dtype=dtype)
        ring_case = Case(Tile(ranks, 1), shape, dtype=dtype, ring=True)
        mesh, ring = run_cases([mesh_case, ring_case])
        assert_same_bits(mesh, ring)


@pytest.mark.parametrize("reduce_input_type", [False, True], ids=["reduce-exact", "reduce-input"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tile", [Tile(1, 1), Tile(1, 4), Tile(2, 2), Tile(4, 2)], ids=str)
def test_low_precision(tile: Tile, dtype: torch.dtype, reduce_input_type: bool) -> None:
    """At most twice the error of eager attention in the same type."""
    reduce_dtype = dtype if reduce_input_type else None
    shape = Shape(B=1, S=101, H=4, H_kv=2, D=16)
    check_cases(
        [
            Case(tile, shape, layout, causal, dtype, reduce_dtype)
            for layout, causal in [("striped", True), ("zigzag", False)]
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [Tile(1, 8), Tile(2, 4), Tile(4, 2), Tile(8, 1)], ids=str)
def test_error_does_not_grow_with_the_ranks(tile: Tile, dtype: torch.dtype) -> None:
    """From one rank to eight at most by half: partial results are not rounded on the way.

    Root mean square, because the greatest of a few roundings is luck.
    """

    def errors(tile: Tile) -> list[float]:
        case = Case(tile, Shape(B=1, S=256, H=4, H_kv=4, D=16), dtype=dtype)
        whole = assemble(case, run_cases([case])[0])
        return [
            float((x.double() - y).square().mean().sqrt()) for x, y in zip(whole, oracle(case), strict=True)
        ]

    for name, alone, spread in zip(Results._fields, errors(Tile(1, 1)), errors(tile), strict=True):
        assert spread <= 1.5 * alone, f"{name}: {spread:.2e} on eight ranks, {alone:.2e} on one"
