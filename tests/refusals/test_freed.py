"""A refused call keeps nothing alive: its tensors go with the error, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import meshattn as ma
from meshattn.mesh import AttentionMesh
from meshattn.testing import run_ranks
from meshattn.trouble import Trouble

SEQ_LEN = 13


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _attend(mesh: AttentionMesh, **options: Any) -> Any:
    """With q, k and v of one tensor of this call."""
    seq = mesh.sequence(SEQ_LEN, cu_seqlens=options.pop("cu_seqlens", None))
    x = torch.ones(2, seq.rows, 4, 8, requires_grad=True)
    options.pop("used", []).append(weakref.ref(x))
    return ma.mesh_attention(x, x, x, seq, **options)


def _of_the_kernel(mesh: AttentionMesh, used: list[Any]) -> None:
    _attend(mesh, used=used, window_size=(3, 0), kernel="sdpa", deterministic=False)


def _in_documents(mesh: AttentionMesh, used: list[Any]) -> None:
    _attend(mesh, used=used, cu_seqlens=[0, 6, SEQ_LEN], softmax_scale=-1.0)


def _of_one_rank(mesh: AttentionMesh, used: list[Any]) -> None:
    _attend(mesh, used=used, causal=mesh.rank == 0)


def _unshard(mesh: AttentionMesh, used: list[Any]) -> None:
    x = torch.ones(SEQ_LEN + 2)
    used.append(weakref.ref(x))
    mesh.sequence(SEQ_LEN).unshard(x, dim=0)


def _backward(mesh: AttentionMesh, used: list[Any]) -> None:
    out = _attend(mesh, used=used)
    torch.autograd.grad(out, out.grad_fn.next_functions[0][0].variable, torch.ones_like(out).to_sparse())


@pytest.mark.parametrize("call", [_of_the_kernel, _in_documents, _of_one_rank, _unshard, _backward])
def test_a_refused_call_is_freed(call: Callable[[AttentionMesh, list[Any]], None]) -> None:
    def on_rank(group: Any) -> bool:
        mesh = ma.init_attention_mesh(group, timeout=20)
        used: list[Any] = []
        refused = False
        try:
            call(mesh, used)
        except ValueError:
            refused = True
        return refused and [x() for x in used] == [None]

    assert run_ranks(2, on_rank) == [True, True]


def test_trouble_holds_the_first_error_until_it_is_let_out() -> None:
    trouble = Trouble()
    assert not trouble and trouble.words is None
    for number in (1, 2):
        with trouble:
            raise ValueError(f"number {number}")
    assert trouble and trouble.words == ("ValueError", "number 1")
    with pytest.raises(ValueError, match="number 1"):
        trouble.let_out()
    assert not trouble
    with pytest.raises(KeyboardInterrupt), trouble:
        raise KeyboardInterrupt
