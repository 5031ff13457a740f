"""Tensors that attention does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from meshattn.mesh import AttentionMesh
from refused_calls import (
    ROWS,
    SEQ_LEN,
    Calls,
    OfSeveralRanks,
    attend,
    check_refused,
    check_refused_on_all,
    ones,
)


class _Wrapper(Tensor):
    """Describes another tensor, as a FakeTensor and quantized weights do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Wrapper:
        made: _Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("nothing is to be computed with it")


def _under_autocast(mesh: AttentionMesh, **tensors: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return attend(mesh, **tensors)


def _nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(ROWS, 4, 8)] * 2)


def _faked(mesh: AttentionMesh) -> Any:
    """Of real tensors such a mode would make fake results, and none of the exchanges."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return attend(mesh, *[torch.ones(2, ROWS, 4, 8)] * 3)


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(2, ROWS, 4, 8)


def _of_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2, ROWS, 4, 8)


CALLS: Calls = {
    "q-of-3-dims": (
        lambda m: attend(m, q=ones(2, ROWS, 8)),
        ("q is [2, 5, 8]", "4 dims", "[batch, rows, heads, head size]"),
    ),
    "whole-sequence": (
        lambda m: attend(m, *[ones(2, SEQ_LEN, 4, 8)] * 3),
        (
            "q is [2, 13, 4, 8]",
            "the 5 rows of a shard",
            "13 tokens, striped",
            "whole sequence",
            "seq.shard(tensor, dim=1)",
        ),
    ),
    "heads-before-rows": (
        lambda m: attend(m, *[ones(2, 4, ROWS, 8)] * 3),
        ("q is [2, 4, 5, 8]", "the 5 rows", "transpose dims 1 and 2"),
    ),
    "k-of-other-rows": (
        lambda m: attend(m, k=ones(2, 6, 4, 8)),
        ("k is [2, 6, 4, 8]", "dim 1 must have the 5 rows"),
    ),
    "v-of-other-rows": (
        lambda m: attend(m, v=ones(2, 6, 4, 8)),
        ("v is [2, 6, 4, 8]", "dim 1 must have the 5 rows"),
    ),
    "integers": (
        lambda m: attend(m, q=ones(2, ROWS, 4, 8, dtype=torch.int32)),
        ("q is torch.int32", "float64, float32, bfloat16 or float16"),
    ),
    "other-dtype": (
        lambda m: attend(m, k=ones(2, ROWS, 4, 8, dtype=torch.bfloat16)),
        ("k is torch.bfloat16 on cpu but q is torch.float32 on cpu", "must agree"),
    ),
    "float64-beside-autocast": (
        lambda m: _under_autocast(m, k=ones(2, ROWS, 4, 8, dtype=torch.float64)),
        ("k is torch.float64 on cpu but q is torch.float32 on cpu", "must agree"),
    ),
    "other-device": (
        lambda m: attend(m, v=torch.ones(2, ROWS, 4, 8, device="meta")),
        ("v is torch.float32 on meta but q is torch.float32 on cpu", "must agree"),
    ),
    "without-memory": (
        lambda m: attend(m, *[torch.ones(2, ROWS, 4, 8, device="meta")] * 3),
        ("q is a Tensor on meta without memory of its own", "pass a plain tensor"),
    ),
    "under-a-transform": (
        lambda m: torch.func.vmap(lambda q: attend(m, q))(ones(3, 2, ROWS, 4, 8)),
        ("inside a transform of torch.func", "call attention outside of it"),
    ),
    "traced": (
        lambda m: torch.jit.trace(lambda q: attend(m, q), ones()),
        ("inside torch.jit.trace", "call attention outside of it"),
    ),
    "beside-what-is-transformed": (
        lambda m: torch.func.grad(lambda x: x * attend(m).sum())(ones()),
        ("inside a transform of torch.func", "call attention outside of it"),
    ),
    "inside-fake-mode": (
        lambda m: _faked(m),
        ("inside FakeTensorMode, whose tensors hold no numbers", "outside of the mode, with real tensors"),
    ),
    "fake": (
        lambda m: attend(m, k=_fake()),
        ("k is a FakeTensor on cpu without memory of its own", "pass a plain tensor"),
    ),
    "a-wrapper": (
        lambda m: attend(m, v=_Wrapper(ones(2, ROWS, 4, 8))),
        ("v is a _Wrapper on cpu without memory of its own",),
    ),
    "odd-head-size": (
        lambda m: attend(m, *[ones(2, ROWS, 4, 12)] * 3),
        ("q is [2, 5, 4, 12]", "head size 12", "multiple of 8", "pad it with zeros and pass softmax_scale"),
    ),
    "odd-head-size-of-v": (
        lambda m: attend(m, v=ones(2, ROWS, 4, 20)),
        ("v is [2, 5, 4, 20]", "multiple of 8"),
    ),
    "batch": (
        lambda m: attend(m, k=ones(1, ROWS, 4, 8)),
        ("batch sizes differ", "q 2, k 1, v 2"),
    ),
    "head-size-of-k": (
        lambda m: attend(m, k=ones(2, ROWS, 4, 16)),
        ("q has head size 8 but k 16", "must agree"),
    ),
    "heads-of-v": (lambda m: attend(m, v=ones(2, ROWS, 2, 8)), ("k has 4 heads but v 2",)),
    "heads-not-a-multiple": (
        lambda m: attend(m, None, *[ones(2, ROWS, 3, 8)] * 2),
        ("q has 4 heads and k 3", "must be a multiple of"),
    ),
    "no-kv-heads": (
        lambda m: attend(m, None, *[ones(2, ROWS, 0, 8)] * 2),
        ("q has 4 heads and k 0",),
    ),
    "nested": (
        lambda m: attend(m, k=_nested()),
        ("k is a nested tensor", "dense"),
    ),
    "of-several-ranks": (
        lambda m: attend(m, v=OfSeveralRanks(ones(2, ROWS, 4, 8))),
        ("v is a OfSeveralRanks", "a plain tensor of this rank", "v.to_local()"),
    ),
    "made-in-inference-mode": (
        lambda m: attend(m, _of_inference(), ones(2, ROWS, 4, 8).requires_grad_()),
        ("q was made in torch.inference_mode() and k requires grad", "pass q.clone()"),
    ),
    "sinks-made-in-inference-mode": (
        lambda m: attend(m, v=ones(2, ROWS, 4, 8).requires_grad_(), sinks=_of_inference()[0, 0, :, 0]),
        ("sinks was made in torch.inference_mode() and v requires grad", "pass sinks.clone()"),
    ),
    "sinks-of-other-heads": (
        lambda m: attend(m, sinks=torch.zeros(3)),
        ("sinks is [3] torch.float32", "[4], a logit for each query head"),
    ),
    "sinks-a-number": (
        lambda m: attend(m, sinks=0.5),
        ("sinks is a float", "a tensor, or None"),
    ),
    "sinks-sparse": (
        lambda m: attend(m, sinks=torch.zeros(4).to_sparse()),
        ("sinks is torch.sparse_coo", "dense"),
    ),
    "sinks-elsewhere": (
        lambda m: attend(m, sinks=torch.zeros(4, device="meta")),
        ("sinks is on meta but q on cpu",),
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", CALLS)
def test_wrong_tensors(name: str) -> None:
    check_refused(CALLS, name)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "name",
    [
        "nested",
        "sinks-sparse",
        "q-of-3-dims",
        "made-in-inference-mode",
        "under-a-transform",
        "inside-fake-mode",
    ],
)
def test_wrong_tensors_of_one_rank_are_everybodys_error(name: str) -> None:
    _fake()  # for the first of them PyTorch imports for seconds, in which others would wait
    check_refused_on_all(CALLS, name)
