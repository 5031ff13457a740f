"""The mask matrix on one GPU that simulated ranks share, with the kernel that the rules choose.

A fixed sample over ranks, tiles, layouts, lengths, head sizes, types, masks, softcap and dropout, each case
compared with dense attention on the CPU.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from cases import Shape
from distributed import LAYOUTS, Case, Packed, assert_same_bits, run_cases
from mask_cases import check_lower_type
from meshattn.plan.assignment import Tile, tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
# Few, because every one of them compiles its own kernels: type, H, H_kv, D, D_v.
WIDE = (torch.bfloat16, 4, 2, 128, 128)
NARROW = (torch.bfloat16, 3, 3, 64, 64)
UNEVEN = (torch.float16, 2, 1, 192, 128)
ODD = (torch.bfloat16, 2, 1, 40, 72)
SINGLE = (torch.float32, 2, 1, 64, 32)
HALF = (torch.float16, 4, 1, 128, 64)
GROUPS = [
    *((size, 0.0, 0.0) for size in (WIDE, NARROW, UNEVEN, ODD, SINGLE, HALF)),
    *((size, 5.0, 0.0) for size in (WIDE, SINGLE)),
    *((size, 0.0, 0.25) for size in (WIDE, ODD)),
    (NARROW, 5.0, 0.25),
]
CASES_OF_A_GROUP = 30


def packing(draw: random.Random, seq_len: int, count: int) -> Packed:
    edges = sorted(draw.randint(0, seq_len) for _ in range(count))
    if draw.random() < 0.5:
        edges[-1] = seq_len
    bounds = (0, *edges)
    if draw.random() < 0.7:
        return Packed(bounds)
    return Packed(bounds, tuple(draw.randint(0, end - start) for start, end in pairwise(bounds)))


def drawn_case(
    draw: random.Random, size: tuple[torch.dtype, int, int, int, int], softcap: float, dropout_p: float
) -> Case:
    dtype, heads, kv_heads, head_dim, head_dim_v = size
    seq_len, layout = draw.randint(1, 400), draw.choice(LAYOUTS)
    keys = draw.randint(1, 400) if draw.random() < 0.3 else None
    count = draw.choice([0, 0, 1, 4, 9])
    bounds = [-1, -1, 0, 5, 64, 200]
    return Case(
        draw.choice(tiles(draw.choice([1, 2, 3, 4, 4, 6]))),
        Shape(draw.randint(1, 2), seq_len, heads, kv_heads, head_dim, head_dim_v, keys),
        layout,
        causal=draw.random() < 0.6,
        dtype=dtype,
        reduce_dtype=dtype if draw.random() < 0.2 else None,
        softmax_scale=draw.choice([None, None, 0.1]),
        seed=draw.randint(0, 3),
        window_size=(draw.choice(bounds), draw.choice(bounds)),
        documents=packing(draw, seq_len, count) if count else None,
        kv_layout=None if keys is None else draw.choice(LAYOUTS),
        kv_documents=packing(draw, keys, count) if count and keys is not None else None,
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_seed=draw.randint(0, 2**64 - 1),
        strided=draw.random() < 0.3,
    )


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_any_mask(group: int) -> None:
    draw = random.Random(group)
    for _ in range(CASES_OF_A_GROUP):
        check_lower_type(drawn_case(draw, *GROUPS[group]), device="cuda")


LONG = Shape(B=1, S=777, H=4, H_kv=2, D=128)
FAMILIES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_size": (200, 0)},
    "documents": {"documents": Packed((0, 100, 100, 517, 518, 777))},
    "gaps": {"documents": Packed((0, 130, 515, 700), (130, 201, 0))},
    "cross": {"shape": Shape(B=1, S=333, H=4, H_kv=2, D=128, S_k=777), "kv_layout": "contiguous"},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout_p": 0.2, "dropout_seed": 2**63},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", [None, "triton", "triton-dash"])
def test_the_same_bits_on_every_run(kernel: str | None, family: str) -> None:
    """Twenty runs of each family of masks."""
    arguments = {"shape": LONG, **FAMILIES[family]}
    case = Case(Tile(2, 2), layout="zigzag", dtype=torch.bfloat16, **arguments)  # type: ignore[arg-type]
    first, *others = run_cases([case] * 20, device="cuda", kernel=kernel)
    for other in others:
        assert_same_bits(first, other)
