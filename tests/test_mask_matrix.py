"""The public call against dense attention over the whole matrix of masks, layouts, tiles and lengths.

Rows that belong to no document hold NaN in all inputs, as padding does, and so do their incoming gradients.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from cases import Results, Shape
from distributed import assert_same_bits, check_cases, run_cases
from mask_cases import check_lower_type, low_precision_cases, mask_cases
from mesh_cases import LAYOUTS, Case, Packed
from meshattn.layouts import LayoutKind
from meshattn.plan.assignment import Tile

SEARCH = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
GQA = Shape(B=1, S=23, H=2, H_kv=1, D=8)
DOCUMENTS = Packed((0, 1, 1, 3, 16, 20))


@settings(max_examples=100, **SEARCH)
@given(mask_cases())
def test_any_mask(case: Case) -> None:
    """Every gradient on every rank."""
    check_cases([case])


@settings(max_examples=25, **SEARCH)
@given(low_precision_cases())
def test_any_mask_in_lower_types(case: Case) -> None:
    check_lower_type(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=4000, **{**SEARCH, "derandomize": False})
@given(mask_cases(most_ranks=12, longest=80))
def test_any_mask_of_larger_groups(case: Case) -> None:
    check_cases([case])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1000, **{**SEARCH, "derandomize": False})
@given(low_precision_cases())
def test_any_mask_in_lower_types_at_length(case: Case) -> None:
    check_lower_type(case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_of_every_kind(layout: LayoutKind) -> None:
    """One token, none, fewer than the ranks, longer than a chunk, a tail; alone, with a window, cross."""
    check_cases(
        [
            Case(tile, GQA, layout, causal, documents=DOCUMENTS, window_size=window)
            for tile in (Tile(1, 6), Tile(2, 3), Tile(3, 2), Tile(6, 1))
            for causal, window in ((True, (-1, -1)), (False, (-1, -1)), (True, (2, 0)), (False, (3, 1)))
        ]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "window_size", [(0, 0), (3, -1), (-1, 2), (4, 3), (40, 40)], ids="window{0[0]},{0[1]}".format
)
def test_windows_across_rank_borders(window_size: tuple[int, int], layout: LayoutKind) -> None:
    """Chunks of four rows and one short: windows that end inside them, and that reach beyond the sequence."""
    check_cases(
        [
            Case(tile, GQA, layout, causal, window_size=window_size)
            for tile in (Tile(1, 6), Tile(2, 3), Tile(6, 1))
            for causal in (False, True)
        ]
    )


@pytest.mark.parametrize(("queries", "keys"), [(1, 29), (3, 17), (29, 3), (17, 1), (6, 6), (24, 30)])
def test_keys_of_another_length(queries: int, keys: int) -> None:
    """A decoded token, a prefilled chunk, more queries than keys, empty ranks on either side."""
    shape = Shape(B=2, S=queries, H=4, H_kv=2, D=8, D_v=16, S_k=keys)
    check_cases(
        [
            Case(tile, shape, layout, causal, kv_layout=kv_layout, window_size=window)
            for tile in (Tile(1, 6), Tile(2, 3), Tile(6, 1))
            for layout, kv_layout in (
                ("striped", "striped"),
                ("contiguous", "contiguous"),
                ("zigzag", "striped"),
            )
            for causal, window in ((True, (-1, -1)), (False, (-1, -1)), (True, (4, 0)))
        ]
    )


MASKS = {
    "causal": {},
    "full": {"causal": False},
    "documents": {"documents": DOCUMENTS},
    "gaps": {"documents": Packed((0, 4, 9, 23), (3, 0, 11))},
    "window": {"window_size": (5, 2), "causal": False},
    "cross": {"kv_layout": "contiguous", "shape": Shape(B=1, S=23, H=2, H_kv=1, D=8, S_k=31)},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout_p": 0.2, "dropout_seed": 1},
    "sinks": {"sinks": True, "documents": DOCUMENTS},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("tile", [Tile(1, 4), Tile(2, 2)], ids=str)
def test_the_same_bits_on_every_run(tile: Tile, name: str) -> None:
    """Twenty runs of a rank's whole pass, in bfloat16, where every other order of sums shows."""
    arguments = {"shape": GQA, "dtype": torch.bfloat16, **MASKS[name]}
    case = Case(tile, layout="zigzag", **arguments)  # type: ignore[arg-type]
    first, *others = run_cases([case] * 20)
    for other in others:
        assert_same_bits(first, other)
    assert all(isinstance(results, Results) for results in first)
