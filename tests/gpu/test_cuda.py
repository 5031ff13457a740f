"""Simulated ranks that share one GPU: the engine on CUDA tensors without a second GPU, with each kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshattn as ma
from cases import Shape
from distributed import assert_same_bits, check_cases, run_cases
from mesh_cases import Case, Packed
from meshattn.plan import Tile
from meshattn_kernels.rules import RULES, Platform, Request

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PACKED = Packed((0, 100, 100, 517, 518, 1031))
GAPS = Packed((0, 130, 515, 900), (130, 201, 0))
CASES = [
    (None, Case(Tile(2, 2), Shape(B=2, S=1031, H=6, H_kv=3, D=64), dtype=BF16)),
    (None, Case(Tile(1, 4), Shape(B=1, S=1301, H=4, H_kv=1, D=128), dtype=BF16)),
    (None, Case(Tile(2, 2), Shape(B=1, S=701, H=2, H_kv=2, D=128), "zigzag", dtype=BF16)),
    (None, Case(Tile(3, 1), Shape(B=2, S=613, H=4, H_kv=2, D=64, D_v=128), dtype=FP16)),
    (None, Case(Tile(1, 2), Shape(B=1, S=517, H=2, H_kv=1, D=48, D_v=32), "contiguous", dtype=BF16)),
    (None, Case(Tile(2, 2), Shape(B=1, S=515, H=4, H_kv=2, D=192), dtype=BF16)),
    (None, Case(Tile(2, 1), Shape(B=1, S=389, H=2, H_kv=2, D=256), dtype=BF16)),
    (None, Case(Tile(1, 2), Shape(B=1, S=389, H=2, H_kv=1, D=192, D_v=128), "zigzag", dtype=FP16)),
    (None, Case(Tile(2, 2), Shape(B=2, S=517, H=6, H_kv=3, D=8), dtype=BF16)),
    (None, Case(Tile(1, 3), Shape(B=1, S=517, H=4, H_kv=1, D=24, D_v=40), dtype=BF16)),
    (None, Case(Tile(2, 2), Shape(B=1, S=389, H=4, H_kv=2, D=64), dtype=FP32)),
    (None, Case(Tile(4, 1), Shape(B=1, S=203, H=2, H_kv=1, D=128), "contiguous", dtype=FP32)),
    (None, Case(Tile(2, 2), Shape(B=1, S=97, H=2, H_kv=1, D=32))),
    (None, Case(Tile(1, 1), Shape(B=1, S=1031, H=4, H_kv=2, D=128), dtype=BF16)),
    (None, Case(Tile(1, 1), Shape(B=1, S=307, H=4, H_kv=2, D=64), dtype=FP32)),
    (None, Case(Tile(1, 1), Shape(B=1, S=307, H=4, H_kv=2, D=64), dtype=FP32, heads=2)),
    (None, Case(Tile(2, 2), Shape(B=1, S=703, H=4, H_kv=2, D=64), dtype=BF16, reduce_dtype=BF16)),
    (None, Case(Tile(2, 2), Shape(B=1, S=3, H=4, H_kv=2, D=64), dtype=BF16)),
    (None, Case(Tile(2, 3), Shape(B=1, S=1009, H=2, H_kv=2, D=64), causal=False, dtype=BF16)),
    (None, Case(Tile(2, 2), Shape(B=2, S=1031, H=4, H_kv=2, D=64), dtype=BF16, documents=PACKED)),
    (None, Case(Tile(1, 3), Shape(B=1, S=1031, H=4, H_kv=1, D=128), "zigzag", dtype=BF16, documents=GAPS)),
    (None, Case(Tile(2, 2), Shape(B=1, S=1031, H=4, H_kv=2, D=128), dtype=BF16, window_size=(300, 0))),
    (
        None,
        Case(
            Tile(2, 2),
            Shape(B=1, S=1031, H=2, H_kv=2, D=24),
            "contiguous",
            causal=False,
            dtype=FP16,
            window_size=(100, 60),
            documents=GAPS,
        ),
    ),
    (
        None,
        Case(
            Tile(2, 2),
            Shape(B=1, S=517, H=4, H_kv=2, D=64, S_k=1031),
            dtype=BF16,
            kv_layout="contiguous",
        ),
    ),
    ("reference", Case(Tile(2, 2), Shape(B=2, S=157, H=6, H_kv=3, D=64), dtype=FP32)),
    ("reference", Case(Tile(1, 4), Shape(B=1, S=89, H=4, H_kv=1, D=32, D_v=16), dtype=BF16)),
    ("triton", Case(Tile(2, 2), Shape(B=2, S=1031, H=6, H_kv=3, D=64), dtype=BF16)),
    ("triton", Case(Tile(4, 1), Shape(B=1, S=517, H=3, H_kv=3, D=128), "zigzag", dtype=FP16)),
    ("triton-dash", Case(Tile(1, 4), Shape(B=2, S=1031, H=4, H_kv=2, D=64), dtype=BF16)),
    ("hopper", Case(Tile(2, 2), Shape(B=2, S=1031, H=6, H_kv=3, D=64), dtype=BF16)),
    ("hopper", Case(Tile(4, 1), Shape(B=1, S=1801, H=3, H_kv=3, D=128), "zigzag", dtype=BF16)),
    ("hopper", Case(Tile(2, 3), Shape(B=1, S=4099, H=4, H_kv=1, D=128), "contiguous", dtype=FP16)),
    ("sdpa", Case(Tile(2, 2), Shape(B=2, S=517, H=6, H_kv=3, D=64), dtype=BF16)),
    ("sdpa", Case(Tile(1, 3), Shape(B=1, S=611, H=4, H_kv=1, D=128), "contiguous", dtype=FP16)),
    ("cudnn", Case(Tile(2, 2), Shape(B=2, S=517, H=6, H_kv=3, D=64), dtype=BF16)),
    ("cudnn", Case(Tile(1, 3), Shape(B=1, S=611, H=4, H_kv=1, D=128, D_v=64), "contiguous", dtype=FP16)),
    ("fa4", Case(Tile(2, 2), Shape(B=2, S=517, H=6, H_kv=3, D=64), dtype=BF16)),
    ("fa4", Case(Tile(1, 3), Shape(B=1, S=611, H=4, H_kv=1, D=128), "contiguous", dtype=FP16)),
    ("fa4", Case(Tile(2, 1), Shape(B=1, S=403, H=4, H_kv=4, D=128), causal=False, dtype=BF16)),
]
UNORDERED = ("sdpa", "cudnn")
REPEATING = [(kernel, case) for kernel, case in CASES if kernel not in UNORDERED]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


def options_of(kernel: str | None, case: Case) -> dict[str, Any]:
    """How to call the case on the GPU; skips a named kernel that this machine has not or cannot run."""
    if kernel is not None:
        platform = Platform.of(torch.device("cuda", torch.cuda.current_device()))
        refused = RULES[kernel](Request(platform, case.dtype, case.shape.D, case.shape.head_dim_v))
        if refused is not None:
            pytest.skip(refused)
    return {"device": "cuda", "kernel": kernel, "deterministic": kernel not in UNORDERED}


@pytest.mark.parametrize("kernel, case", CASES, ids=str)
def test_cuda_equals_the_oracle(kernel: str | None, case: Case) -> None:
    check_cases([case], **options_of(kernel, case))


@pytest.mark.parametrize("kernel, case", REPEATING, ids=str)
def test_cuda_repeats_its_bits(kernel: str | None, case: Case) -> None:
    first, second = run_cases([case, case], **options_of(kernel, case))
    assert_same_bits(first, second)


@pytest.mark.parametrize("dtype, D", [(BF16, 64), (BF16, 128), (FP16, 256), (FP32, 64)], ids=str)
def test_ring_attention_is_the_tile_1xP_bit_for_bit(dtype: torch.dtype, D: int) -> None:
    shape = Shape(B=1, S=1031, H=4, H_kv=2, D=D)
    mesh = Case(Tile(1, 4), shape, dtype=dtype)
    ring = Case(Tile(1, 4), shape, dtype=dtype, ring=True)
    assert_same_bits(*run_cases([mesh, ring], device="cuda"))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)
@pytest.mark.parametrize(
    "dtype, D, D_v, expected",
    [
        (BF16, 64, 64, "hopper"),
        (FP16, 128, 48, "hopper"),
        (BF16, 192, 128, "triton"),
        (BF16, 24, 24, "triton"),
        (FP32, 64, 64, "triton"),
        (torch.float64, 64, 64, "reference"),
    ],
    ids=str,
)
def test_the_default_on_hopper(dtype: torch.dtype, D: int, D_v: int, expected: str) -> None:
    assert ma.kernel_for("cuda", dtype, D, D_v) == expected


def test_a_named_kernel_has_its_own_bits() -> None:
    """The default is not the reference kernel: its sums have another order."""
    case = Case(Tile(2, 2), Shape(B=1, S=515, H=2, H_kv=1, D=64), dtype=BF16)
    (default,) = run_cases([case], device="cuda")
    (reference,) = run_cases([case], device="cuda", kernel="reference")
    assert any(not torch.equal(x.dk, y.dk) for x, y in zip(default, reference, strict=True))


@pytest.mark.parametrize("D", [264, 512])
def test_what_no_fast_kernel_serves_is_refused(D: int) -> None:
    case = Case(Tile(1, 2), Shape(B=1, S=13, H=1, H_kv=1, D=D), dtype=BF16)
    with pytest.raises(ValueError, match=rf"head size {D}; .* kernel='reference' \(which is slow\)"):
        run_cases([case], device="cuda")
    check_cases([case], device="cuda", kernel="reference")
