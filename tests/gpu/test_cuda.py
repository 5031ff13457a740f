"""Simulated ranks that share one GPU: the engine on CUDA tensors without a second GPU."""

from __future__ import annotations

import pytest
import torch

from cases import Shape
from distributed import Case, assert_same_bits, check_cases, run_cases
from meshattn.plan import Tile

CASES = [
    Case(Tile(2, 2), Shape(B=2, S=157, H=6, H_kv=3, D=64), dtype=torch.float32),
    Case(Tile(1, 4), Shape(B=1, S=89, H=4, H_kv=1, D=32, D_v=16), layout="zigzag", dtype=torch.bfloat16),
    Case(Tile(4, 1), Shape(B=1, S=1031, H=3, H_kv=3, D=128), layout="contiguous", dtype=torch.float16),
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_equals_the_oracle(case: Case) -> None:
    check_cases([case], device="cuda")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_repeats_its_bits(case: Case) -> None:
    first, second = run_cases([case, case], device="cuda")
    assert_same_bits(first, second)
