"""Errors in bfloat16 do not grow with the number of ranks, as long as partial results travel in float32."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import error_growth
from meshattn.plan import Tile

SEED = 0
DOCS = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"


@lru_cache(maxsize=1)
def exact() -> dict[int, list[Tensor]]:
    return {SEED: error_growth.exact(SEED)}


@lru_cache(maxsize=1)
def alone() -> dict[str, float]:
    return error_growth.errors(Tile(1, 1), torch.float32, exact())


@pytest.mark.parametrize("tile", [Tile(1, 8), Tile(2, 4), Tile(8, 1)], ids=str)
def test_eight_ranks_are_as_exact_as_one(tile: Tile) -> None:
    """At most 1.5 times the error of one rank; where partial results travel rounded it is more for the ring,
    so that the bound can fail."""
    together = error_growth.errors(tile, torch.float32, exact())
    for name, error in alone().items():
        assert 0 < error < 0.01 and together[name] <= 1.5 * error, name
    if tile == Tile(1, 8):
        rounded = error_growth.errors(tile, torch.bfloat16, exact())
        assert rounded["dk"] > 1.5 * alone()["dk"] and rounded["out"] <= 1.01 * alone()["out"]


def test_the_docs_hold_a_line_for_every_tile() -> None:
    text = DOCS.read_text()
    assert "python benchmarks/error_growth.py" in text
    for tile in error_growth.TILES:
        assert f"| {tile.ranks} | {tile} |" in text
