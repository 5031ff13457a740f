"""The mask matrix on one GPU that simulated ranks share, with the kernel that the rules choose.

A fixed sample over ranks, axes, tiles, layouts, lengths, head sizes, types, masks, sinks, softcap and
dropout, each case compared with dense attention on the CPU; what a token can touch, by bits; and bits that
repeat.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

import distributed
import sink_runs
from cases import Inputs, Results, Shape
from distributed import assert_same_bits, run_cases
from mask_cases import check_lower_type
from mesh_cases import LAYOUTS, Case, Packed, inputs_of, sinks_of
from meshattn.plan.assignment import Tile, tiles
from meshattn.reference import visible_pairs
from probes import changed, results_of, with_token
from tolerance import error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
# Few, because every one of them compiles its own kernels: type, H, H_kv, D, D_v.
Size = tuple[torch.dtype, int, int, int, int]
WIDE = (torch.bfloat16, 4, 2, 128, 128)
NARROW = (torch.bfloat16, 3, 3, 64, 64)
UNEVEN = (torch.float16, 2, 1, 192, 128)
ODD = (torch.bfloat16, 2, 1, 40, 72)
SINGLE = (torch.float32, 2, 1, 64, 32)
HALF = (torch.float16, 4, 1, 128, 64)
GROUPS = [  # size, softcap, dropout, kernel, whether views of other strides and head axes are drawn too
    *((size, 0.0, 0.0, None, True) for size in (WIDE, NARROW, HALF)),
    *((size, 0.0, 0.0, None, False) for size in (UNEVEN, ODD, SINGLE)),
    *((size, 5.0, 0.0, None, False) for size in (WIDE, SINGLE)),
    *((size, 0.0, 0.25, None, False) for size in (WIDE, ODD)),
    (NARROW, 5.0, 0.25, None, False),
    (NARROW, 0.0, 0.0, "triton", True),
    (WIDE, 0.0, 0.0, "triton-dash", False),
    (ODD, 0.0, 0.25, "triton-dash", False),
]
CASES_OF_A_GROUP, PARTS = 30, 3
# The first run of a test compiles kernels, beside other tests that do so.
ON_GPU: dict[str, Any] = {"device": "cuda", "timeout": 280.0}


def packing(draw: random.Random, seq_len: int, count: int) -> Packed:
    edges = sorted(draw.randint(0, seq_len) for _ in range(count))
    if draw.random() < 0.5:
        edges[-1] = seq_len
    bounds = (0, *edges)
    if draw.random() < 0.7:
        return Packed(bounds)
    return Packed(bounds, tuple(draw.randint(0, end - start) for start, end in pairwise(bounds)))


def drawn_case(draw: random.Random, size: Size, softcap: float, dropout_p: float, views: bool) -> Case:
    dtype, heads, kv_heads, head_dim, head_dim_v = size
    seq_len, layout = draw.randint(1, 400), draw.choice(LAYOUTS)
    keys = draw.randint(1, 400) if draw.random() < 0.3 else None
    count = draw.choice([0, 0, 1, 4, 9])
    bounds = [-1, -1, 0, 5, 64, 200]
    tile = draw.choice(tiles(draw.choice([1, 2, 3, 4, 4, 6])))
    return Case(
        tile,
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
        strided=views and draw.random() < 0.3,
        sinks=draw.random() < 0.2,
        heads=heads if views and tile.ranks <= 3 and draw.random() < 0.3 else 1,
    )


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_any_mask(group: int, part: int) -> None:
    draw, (size, softcap, dropout_p, kernel, views) = random.Random(group), GROUPS[group]
    cases = [drawn_case(draw, size, softcap, dropout_p, views) for _ in range(CASES_OF_A_GROUP)]
    for case in cases[part::PARTS]:
        check_lower_type(case, kernel=kernel, **ON_GPU)


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
    "sinks": {"sinks": True, "documents": Packed((0, 130, 515, 700))},
}
KERNELS = [None, "triton", "triton-dash"]


def case_of(family: str) -> Case:
    arguments = {"shape": LONG, **FAMILIES[family]}
    return Case(Tile(2, 2), layout="zigzag", dtype=torch.bfloat16, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_same_bits_on_every_run(kernel: str | None, family: str) -> None:
    """Twenty runs of each family of masks."""
    first, *others = run_cases([case_of(family)] * 20, kernel=kernel, **ON_GPU)
    for other in others:
        assert_same_bits(first, other)


PROBED = ("documents", "gaps", "window", "cross", "dropout", "sinks")
# Beside borders of documents and windows, and of chunks of 195 rows in two halves.
PROBES = (0, 99, 100, 332, 516, 517, 699)


@pytest.mark.parametrize("family", PROBED)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_token_touches_what_the_mask_lets_it_reach(
    kernel: str | None, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key the queries that see it, and by their gradients the keys that these see; a query its own row and
    the keys that it sees. No other bit changes."""
    case = case_of(family)
    inputs = inputs_of(case.shape, case.dtype, case.seed)
    visible = visible_pairs(case.shape.S, case.shape.seq_len_k, **case.rule)

    def results(given: Inputs) -> Results:
        return results_of(case, given, monkeypatch, kernel=kernel, **ON_GPU)

    before = results(inputs)
    assert not before.out[:, ~visible.any(1)].any() and not before.dq[:, ~visible.any(1)].any()
    for position in PROBES:
        found = changed(before, results(with_token(inputs, "k v", position)))
        queries = visible[:, position]
        seeing = set(queries.nonzero().flatten().tolist())
        beside = set(visible[queries].any(0).nonzero().flatten().tolist())
        assert found["lse"] == seeing and found["out"] <= seeing and found["dq"] <= seeing, position
        assert found["dk"] <= beside and found["dv"] <= beside, position
        assert bool(found["out"]) == bool(seeing), position
        assert bool(found["dv"]) == (len(beside) > 1), position  # p of a single key is 1, whatever its score
    for position in (x for x in PROBES if x < case.shape.S):
        found = changed(before, results(with_token(inputs, "q do", position)))
        seen = set(visible[position].nonzero().flatten().tolist())
        own = {position} if seen else set()
        assert found["lse"] == own and found["out"] <= own and found["dq"] <= own, position
        assert found["dk"] <= seen and found["dv"] <= seen and bool(found["dv"]) == bool(seen), position


@pytest.mark.parametrize("family", ["gaps", "cross"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_padding_holds_changes_no_bit(
    kernel: str | None, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN, as in all other tests, or numbers."""
    options = {"kernel": kernel, **ON_GPU}
    (before,) = run_cases([case_of(family)], **options)
    monkeypatch.setattr(distributed, "PADDING", 3.0)
    (after,) = run_cases([case_of(family)], **options)
    assert_same_bits(before, after)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_sinks(kernel: str | None) -> None:
    """Those of the ranks sum up to that of dense attention, and repeat their bits."""
    case = case_of("documents")
    sinks = sinks_of(case).float()
    _, dsinks = sink_runs.run(case, sinks, kernel=kernel, **ON_GPU)
    _, again = sink_runs.run(case, sinks, kernel=kernel, **ON_GPU)
    assert all(torch.equal(x, y) for x, y in zip(dsinks, again, strict=True))
    expected = sink_runs.dense(case)[1]
    assert error(torch.stack(dsinks).sum(0), expected) < 0.02 * float(expected.abs().max())
