"""Random cases over the cross product of ranks, axes, layouts, lengths and masks."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st

from cases import Results, Shape
from distributed import assemble, run_cases
from mesh_cases import LAYOUTS, Case, Packed, eager, oracle
from meshattn.plan.assignment import tiles
from tolerance import bound, error

HEADS = [(1, 1), (2, 1), (3, 3), (4, 2), (5, 1), (6, 3)]  # H, H_kv
HEAD_DIMS = [(8, None), (16, 8), (8, 24)]  # D, D_v
TYPES = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, None),
]


@st.composite
def packings(draw: st.DrawFn, seq_len: int, count: int) -> Packed:
    """Documents of any lengths, 0 and 1 among them; some packings end before the sequence, some have gaps."""
    edges = sorted(draw(st.lists(st.integers(0, seq_len), min_size=count, max_size=count)))
    if draw(st.booleans()):
        edges[-1] = seq_len
    bounds = (0, *edges)
    if draw(st.integers(0, 3)):
        return Packed(bounds)
    return Packed(bounds, tuple(draw(st.integers(0, end - start)) for start, end in pairwise(bounds)))


@st.composite
def mask_cases(draw: st.DrawFn, most_ranks: int = 6, longest: int = 33) -> Case:
    """Cases in float64; ``in_lower_type`` makes others of them."""
    tile = draw(st.sampled_from(tiles(draw(st.integers(1, most_ranks)))))
    seq_len, layout = draw(st.integers(1, longest)), draw(st.sampled_from(LAYOUTS))
    heads, kv_heads = draw(st.sampled_from(HEADS))
    axis = draw(
        st.sampled_from([w for w in range(1, heads + 1) if heads % w == 0 and w * tile.ranks <= most_ranks])
    )
    head_dim, head_dim_v = draw(st.sampled_from(HEAD_DIMS))
    keys = draw(st.integers(1, longest)) if draw(st.booleans()) else None
    count = draw(st.integers(0, 6))  # documents
    bounds = st.sampled_from([-1, -1, 0, 1, 4, 40])
    return Case(
        tile,
        Shape(draw(st.integers(1, 2)), seq_len, heads, kv_heads, head_dim, head_dim_v, keys),
        layout,
        causal=draw(st.booleans()),
        softmax_scale=draw(st.sampled_from([None, None, 0.3])),
        ring=tile.a == 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        window_size=(draw(bounds), draw(bounds)),
        documents=draw(packings(seq_len, count)) if count else None,
        kv_layout=None if keys is None else draw(st.sampled_from(LAYOUTS)),
        kv_documents=draw(packings(keys, count)) if count and keys is not None else None,
        softcap=draw(st.sampled_from([0.0, 0.0, 0.0, 0.5, 20.0])),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.0, 0.2, 0.7])),
        dropout_seed=draw(st.sampled_from([0, 2**64 - 1])),
        sinks=draw(st.sampled_from([False, False, True])),
        strided=draw(st.booleans()),
        heads=axis,
    )


@st.composite
def low_precision_cases(draw: st.DrawFn) -> Case:
    """The same in lower types, with partial results in theirs or in float32."""
    case = draw(mask_cases())
    dtype, reduce_dtype = draw(st.sampled_from(TYPES))
    return Case(**{**vars(case), "dtype": dtype, "reduce_dtype": reduce_dtype})


def check_lower_type(case: Case, **options: Any) -> None:
    """By the rule of ``tolerance`` and beyond it: a few roundings of numbers of size 1, since delta is made
    of rounded ``out``, and what sums of the order of 10 leave in float32 where they cancel; dropout makes
    both larger. Those of delta are D_v for each row, of which dk sums some for each query head of a group.

    Among the few numbers of a document of two tokens eager attention may have rounded nothing, and a row of
    one key has nothing to round.
    """
    rounding = 4 * torch.finfo(case.dtype).eps + 32 * torch.finfo(torch.float32).eps
    slack = rounding / (1 - case.dropout_p)
    shape = case.shape
    summed = max(1.0, math.sqrt(shape.head_dim_v * shape.H / shape.H_kv) / 8)
    whole, exact, rounded = assemble(case, run_cases([case], **options)[0]), oracle(case), eager(case)
    for name in Results._fields:
        actual, expected = getattr(whole, name), getattr(exact, name)
        allowed = bound(expected, actual.dtype, getattr(rounded, name))
        allowed += slack * (summed if name in ("dq", "dk") else 1.0)
        found = error(actual, expected)
        assert found <= allowed, f"{case}: {name}: error {found:.3e} > {allowed:.3e}"
