"""Simulated ranks that share one GPU: the engine on CUDA tensors without a second GPU, with each kernel."""

from __future__ import annotations

import pytest
import torch

from cases import Shape
from distributed import Case, assert_same_bits, check_cases, run_cases
from meshattn.plan import Tile

CASES = [
    ("reference", Case(Tile(2, 2), Shape(B=2, S=157, H=6, H_kv=3, D=64), dtype=torch.float32)),
    ("reference", Case(Tile(1, 4), Shape(B=1, S=89, H=4, H_kv=1, D=32, D_v=16), dtype=torch.bfloat16)),
    ("triton", Case(Tile(2, 2), Shape(B=2, S=1031, H=6, H_kv=3, D=64), dtype=torch.bfloat16)),
    ("triton", Case(Tile(4, 1), Shape(B=1, S=517, H=3, H_kv=3, D=128), "zigzag", dtype=torch.float16)),
    ("triton-dash", Case(Tile(1, 4), Shape(B=2, S=1031, H=4, H_kv=2, D=64), dtype=torch.bfloat16)),
    ("hopper", Case(Tile(2, 2), Shape(B=2, S=1031, H=6, H_kv=3, D=64), dtype=torch.bfloat16)),
    ("hopper", Case(Tile(4, 1), Shape(B=1, S=1801, H=3, H_kv=3, D=128), "zigzag", dtype=torch.bfloat16)),
    ("hopper", Case(Tile(2, 3), Shape(B=1, S=4099, H=4, H_kv=1, D=128), "contiguous", dtype=torch.float16)),
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _serves(kernel: str) -> bool:
    return kernel != "hopper" or torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize("kernel, case", CASES, ids=str)
def test_cuda_equals_the_oracle(kernel: str, case: Case) -> None:
    if not _serves(kernel):
        pytest.skip("the hopper kernel serves sm_90 only")
    check_cases([case], device="cuda", kernel=kernel)


@pytest.mark.parametrize("kernel, case", CASES, ids=str)
def test_cuda_repeats_its_bits(kernel: str, case: Case) -> None:
    if not _serves(kernel):
        pytest.skip("the hopper kernel serves sm_90 only")
    first, second = run_cases([case, case], device="cuda", kernel=kernel)
    assert_same_bits(first, second)
