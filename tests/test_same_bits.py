"""The same bits on every run, and in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import Results
from distributed import assert_equals_oracle, assert_same_bits, run_cases
from leaf_calls import CASE
from mesh_cases import Case
from meshattn.plan.assignment import Tile

BITS = [
    Case(tile, CASE.shape, layout, dtype=dtype)
    for tile, layout in [(Tile(1, 4), "striped"), (Tile(2, 2), "zigzag"), (Tile(4, 1), "contiguous")]
    for dtype in (torch.float32, torch.bfloat16)
]


def digest(runs: list[list[Results]]) -> str:
    """Sums of the bytes of all results, weighted so that their order counts."""

    def weighted(x: Tensor) -> int:
        data = x.contiguous().view(torch.uint8).flatten().long()
        return int((data * torch.arange(1, len(data) + 1)).sum())

    return str([[weighted(x) for results in by_rank for x in results] for by_rank in runs])


def test_same_bits_on_three_runs_and_in_a_fresh_process() -> None:
    first = run_cases(BITS)
    for _ in range(2):
        for mine, again in zip(first, run_cases(BITS), strict=True):
            assert_same_bits(mine, again)
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import torch; "
        "torch.set_num_threads(1); from test_same_bits import BITS, digest, run_cases; "
        "print(digest(run_cases(BITS)))"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == digest(first)


def test_bits_see_a_change_of_one_bit() -> None:
    """The negative control of the tests above."""
    (by_rank,) = run_cases([BITS[0]])
    changed = by_rank[0]._replace(dq=by_rank[0].dq.clone())
    changed.dq.view(torch.int32).flatten()[3] ^= 1
    with pytest.raises(AssertionError, match="dq of rank 0"):
        assert_same_bits([changed, *by_rank[1:]], by_rank)
    assert_equals_oracle(BITS[0], [changed, *by_rank[1:]])
