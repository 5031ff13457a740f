"""The lse merge: equal to attention over the union of the keys, in any order, with empty sides."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cases import Shape, dense, make_inputs
from meshattn.reference import attention
from meshattn_kernels.merge import merge_partial
from tolerance import assert_close

SHAPE = Shape(B=2, S=5, H=6, H_kv=3, D=4, D_v=7, S_k=13)
CUTS = [0, 1, 4, 9, 13]


def partials(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Attention to four disjoint sets of keys."""
    q, k, v, _ = make_inputs(SHAPE, dtype)
    return [attention(q, k[:, t0:t1], v[:, t0:t1]) for t0, t1 in pairwise(CUTS)]


def empty_like(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(out), torch.full_like(lse, -math.inf)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)], ids=str)
def test_merge_is_attention_over_all_keys(dtype: torch.dtype, order: tuple[int, ...]) -> None:
    inputs = make_inputs(SHAPE, dtype)
    oracle, eager = dense(inputs, torch.float64), dense(inputs)
    parts = partials(dtype)
    out, lse = (x.clone() for x in parts[order[0]])
    for n in order[1:]:
        merge_partial(out, lse, *parts[n])
    assert_close("out", out, oracle.out, eager.out)
    assert_close("lse", lse, oracle.lse, eager.lse)


def test_merge_tree_equals_merge_chain() -> None:
    chain = [(out.clone(), lse.clone()) for out, lse in partials(torch.float64)]
    tree = [(out.clone(), lse.clone()) for out, lse in partials(torch.float64)]
    for part in chain[1:]:
        merge_partial(*chain[0], *part)
    merge_partial(*tree[0], *tree[1])
    merge_partial(*tree[2], *tree[3])
    merge_partial(*tree[0], *tree[2])
    assert_close("out", tree[0][0], chain[0][0])
    assert_close("lse", tree[0][1], chain[0][1])


def test_an_empty_side_changes_no_bit() -> None:
    part = partials(torch.float32)[2]
    out, lse = (x.clone() for x in part)
    merge_partial(out, lse, *empty_like(*part))
    assert torch.equal(out, part[0]) and torch.equal(lse, part[1])
    out, lse = empty_like(*part)
    merge_partial(out, lse, *part)
    assert torch.equal(out, part[0]) and torch.equal(lse, part[1])


def test_rows_empty_on_both_sides_stay_empty_among_others() -> None:
    (out, lse), (other_out, other_lse) = ((o.clone(), m.clone()) for o, m in partials(torch.float64)[:2])
    oracle_out, oracle_lse = out.clone(), lse.clone()
    merge_partial(oracle_out, oracle_lse, other_out, other_lse)
    for o, m in ((out, lse), (other_out, other_lse), (oracle_out, oracle_lse)):
        o[:, 3], m[:, :, 3] = 0.0, -math.inf
    merge_partial(out, lse, other_out, other_lse)
    assert torch.equal(out, oracle_out) and torch.equal(lse, oracle_lse)
    assert (out[:, 3] == 0).all() and (lse[:, :, 3] == -math.inf).all()


@pytest.mark.parametrize("shift", [-1e4, 1e4, -1e30], ids=str)
def test_far_apart_and_large_lse_stay_finite(shift: float) -> None:
    (out, lse), (other_out, other_lse) = ((o.clone(), m.clone()) for o, m in partials(torch.float32)[:2])
    greater = (out.clone(), lse.clone()) if shift < 0 else (other_out.clone(), other_lse + shift)
    merge_partial(out, lse, other_out, other_lse + shift)
    assert torch.equal(out, greater[0]) and torch.equal(lse, greater[1])


def test_equal_lse_gives_the_mean() -> None:
    out, lse = (x.clone() for x in partials(torch.float64)[0])
    other_out = -3 * out
    expected_out, expected_lse = -out, lse + math.log(2)
    merge_partial(out, lse, other_out, lse.clone())
    assert_close("out", out, expected_out)
    assert_close("lse", lse, expected_lse)


def test_partials_of_a_lower_type_are_merged_in_the_accumulator_type() -> None:
    (out, lse), (other_out, other_lse) = ((o.clone(), m.clone()) for o, m in partials(torch.float32)[:2])
    low = other_out.bfloat16()
    expected_out, expected_lse = out.clone(), lse.clone()
    merge_partial(expected_out, expected_lse, low.float(), other_lse)
    merge_partial(out, lse, low, other_lse)
    assert out.dtype == lse.dtype == torch.float32
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)


def test_merge_works_on_views_of_one_buffer() -> None:
    (out, lse), other = partials(torch.float64)[:2]
    buffer = torch.cat([out.flatten(), lse.flatten()])
    out_view = buffer[: out.numel()].view(out.shape)
    lse_view = buffer[out.numel() :].view(lse.shape)
    merge_partial(out_view, lse_view, *other)
    expected_out, expected_lse = out.clone(), lse.clone()
    merge_partial(expected_out, expected_lse, *other)
    assert torch.equal(buffer, torch.cat([expected_out.flatten(), expected_lse.flatten()]))
