"""The dense oracle against PyTorch's own attention, finite differences and the definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cases import Inputs, Shape, dense, make_inputs
from meshattn.reference import attention, visible_pairs
from tolerance import assert_close, error

SHAPES = [
    Shape(B=2, S=7, H=3, H_kv=3, D=5),
    Shape(B=1, S=13, H=8, H_kv=2, D=4, D_v=6),
    Shape(B=3, S=5, H=4, H_kv=1, D=7, D_v=2, S_k=11),
    Shape(B=2, S=1, H=6, H_kv=3, D=8, S_k=9),
]
RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "causal-window": {"causal": True, "window_size": (2, -1)},
    "documents": {"causal": True, "cu_seqlens_q": (0, 2, 2, 5), "cu_seqlens_k": (0, 4, 6, 9)},
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_equals_torch(shape: Shape, causal: bool) -> None:
    inputs = make_inputs(shape)
    results = dense(inputs, causal=causal, softmax_scale=0.37)
    q, k, v, do = inputs
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    visible = visible_pairs(shape.S, shape.seq_len_k, causal=causal) if shape.S_k else None
    out = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=visible,
        is_causal=causal and visible is None,
        scale=0.37,
        enable_gqa=True,
    ).transpose(1, 2)
    gradients = torch.autograd.grad(out, (q, k, v), do)
    for name, ours, theirs in zip(
        ("out", "dq", "dk", "dv"), (results.out, *results[2:]), (out, *gradients), strict=True
    ):
        assert_close(name, ours, theirs.detach())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_gradients_equal_finite_differences(rule: dict[str, Any]) -> None:
    q, k, v, _ = make_inputs(Shape(B=1, S=6, H=2, H_kv=1, D=2, D_v=3, S_k=9), seed=3)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, **rule)[0]

    assert torch.autograd.gradcheck(out, leaves, fast_mode=True)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_equals_the_definition_row_by_row(rule: dict[str, Any]) -> None:
    shape = Shape(B=2, S=6, H=4, H_kv=2, D=3, D_v=5, S_k=9)
    inputs = make_inputs(shape)
    q, k, v, _ = inputs
    out, lse = attention(q, k, v, **rule)
    visible = visible_pairs(shape.S, shape.seq_len_k, **rule)
    for b in range(shape.B):
        for h in range(shape.H):
            for s in range(shape.S):
                keys = visible[s].nonzero().flatten()
                weights = (k[b, keys, h // 2] @ q[b, s, h] / math.sqrt(shape.D)).exp()
                assert_close("lse", lse[b, h, s], weights.sum().log())
                expected = (
                    weights @ v[b, keys, h // 2] / weights.sum() if len(keys) else torch.zeros(5).double()
                )
                assert_close("out", out[b, s, h], expected)


def test_rows_that_see_nothing_are_zero_without_nan() -> None:
    shape = Shape(B=2, S=7, H=2, H_kv=2, D=3, S_k=4)  # bottom-right: the first three queries see no key
    results = dense(make_inputs(shape), causal=True)
    assert (results.out[:, :3] == 0).all() and (results.dq[:, :3] == 0).all()
    assert (results.lse[:, :, :3] == -math.inf).all() and results.lse[:, :, 3:].isfinite().all()
    for x in (results.out, *results[2:]):
        assert x.isfinite().all()
    assert (results.dk != 0).all()


def test_nothing_is_visible_beyond_the_documents() -> None:
    shape = Shape(B=1, S=8, H=2, H_kv=2, D=3)
    results = dense(make_inputs(shape), cu_seqlens_q=(0, 2, 5))
    assert (results.out[:, 5:] == 0).all() and (results.lse[:, :, 5:] == -math.inf).all()
    for x in results[2:]:
        assert (x[:, 5:] == 0).all() and x.isfinite().all()


def test_documents_are_separate_attentions() -> None:
    inputs = make_inputs(Shape(B=2, S=9, H=4, H_kv=2, D=3))
    together = dense(inputs, causal=True, cu_seqlens_q=torch.tensor([0, 4, 4, 9], dtype=torch.int32))
    for t0, t1 in ((0, 4), (4, 9)):
        alone = dense(Inputs(*(x[:, t0:t1] for x in inputs)), causal=True)
        assert_close("lse", together.lse[:, :, t0:t1], alone.lse)
        for name in ("out", "dq", "dk", "dv"):
            assert_close(name, getattr(together, name)[:, t0:t1], getattr(alone, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_lower_types_give_their_type_and_a_softmax_in_float32(dtype: torch.dtype) -> None:
    inputs = make_inputs(Shape(B=1, S=33, H=4, H_kv=2, D=16), dtype)
    low, oracle = dense(inputs, causal=True), dense(inputs, torch.float64, causal=True)
    assert low.out.dtype == low.dq.dtype == low.dk.dtype == low.dv.dtype == dtype
    assert low.lse.dtype == torch.float32
    for ours, exact in zip(low, oracle, strict=True):
        assert error(ours, exact) < 16 * torch.finfo(dtype).eps * float(exact.abs().max())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (([1, 4, 3], [1, 4, 3, 2], [1, 4, 3, 2]), "q has shape"),
        (([1, 4, 3, 2], [1, 4, 2, 2], [1, 4, 2, 2]), "H must be a multiple of H_kv"),
        (([1, 4, 3, 2], [1, 5, 3, 2], [1, 4, 3, 2]), "do not fit"),
        (([1, 4, 3, 2], [1, 4, 3, 5], [1, 4, 3, 5]), "do not fit"),
        (([2, 4, 3, 2], [1, 4, 3, 2], [1, 4, 3, 2]), "do not fit"),
    ],
    ids=["3-D", "heads", "lengths", "head sizes", "batch"],
)
def test_shapes_that_do_not_fit_are_refused(sizes: tuple[list[int], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*(torch.zeros(size) for size in sizes))


def test_mixed_types_and_bad_masks_are_refused() -> None:
    q, k, v, _ = make_inputs(Shape(B=1, S=4, H=2, H_kv=1, D=3))
    with pytest.raises(ValueError, match=r"k is torch\.float32"):
        attention(q, k.float(), v)
    with pytest.raises(ValueError, match="window_size"):
        attention(q, k, v, window_size=(-3, 0))
    with pytest.raises(ValueError, match="without cu_seqlens_q"):
        attention(q, k, v, cu_seqlens_k=(0, 4))
    with pytest.raises(ValueError, match="cu_seqlens_q has 1 documents and cu_seqlens_k 2"):
        attention(q, k, v, cu_seqlens_q=(0, 4), cu_seqlens_k=(0, 2, 4))
    with pytest.raises(ValueError, match="cu_seqlens_q ends at 5"):
        attention(q, k, v, cu_seqlens_q=(0, 5))
