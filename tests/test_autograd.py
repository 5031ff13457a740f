"""The edge to autograd: views, partial gradients, gradients through lse, and those that are refused."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import meshattn as ma
from cases import Results, Shape
from distributed import Backend, assemble, assert_same_bits, local_inputs, local_rows, run_cases, sequences
from leaf_calls import CASE, Leaves, attend, leaves_of, on_ranks, results_via
from mesh_cases import Case, Packed, inputs_of
from meshattn import reference
from meshattn.engine import row_terms
from meshattn.mesh import AttentionMesh
from meshattn.plan.assignment import Tile
from meshattn.testing import run_ranks
from tolerance import assert_close


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _every_second(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1).flatten(-2)[..., ::2]


def _negated_when_read(x: Tensor) -> Tensor:
    """Its memory has the other sign, as that of the imaginary part of a conjugate."""
    return torch._neg_view(-x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "view", [_heads_first, _every_second, _negated_when_read], ids=["transposed", "strided", "negated"]
)
@pytest.mark.parametrize("tile", [Tile(1, 3), Tile(3, 1), Tile(2, 2)], ids=str)
def test_inputs_of_any_strides(tile: Tile, view: Callable[[Tensor], Tensor]) -> None:
    case = Case(tile, CASE.shape)
    plain = run_cases([case])[0]

    def on_rank(mesh: AttentionMesh) -> Results:
        (q, k, v), do = leaves_of(case, mesh.rank)
        out, lse = attend(mesh, case, view(q), view(k), view(v), return_lse=True)
        assert not view(do).is_contiguous() or view(do).is_neg()
        return Results(out.detach(), lse, *torch.autograd.grad(out, (q, k, v), view(do)))

    assert_same_bits(on_ranks(case, on_rank), plain)


def test_expanded_inputs_and_gradients() -> None:
    """``out.sum()`` sends back one number with all strides 0; one head of q and k may stand for all."""
    case = Case(Tile(2, 2), Shape(B=2, S=12, H=4, H_kv=4, D=8))

    def on_rank(mesh: AttentionMesh) -> tuple[Results, Results]:
        (q, k, v), _ = leaves_of(case, mesh.rank)
        pair = []
        for spread in (lambda x: x.expand(-1, -1, 4, -1), lambda x: x.repeat(1, 1, 4, 1)):
            heads = [x.detach()[:, :, :1].clone().requires_grad_() for x in (q, k, v)]
            out, lse = attend(mesh, case, *map(spread, heads), return_lse=True)
            do = torch.ones(()).double().expand(out.shape) if not pair else torch.ones_like(out)
            pair.append(Results(out.detach(), lse, *torch.autograd.grad(out, heads, do)))
        return pair[0], pair[1]

    for expanded, repeated in on_ranks(case, on_rank):
        assert_same_bits([expanded], [repeated])


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv", "kv"])
def test_only_some_inputs_require_grad(wanted: str) -> None:
    expected = run_cases([CASE])[0]

    def on_rank(mesh: AttentionMesh) -> list[Tensor | None]:
        leaves, do = leaves_of(CASE, mesh.rank)
        for name, leaf in zip("qkv", leaves, strict=True):
            leaf.requires_grad_(name in wanted)
        attend(mesh, CASE, *leaves).backward(do)
        return [leaf.grad for leaf in leaves]

    for rank, grads in enumerate(on_ranks(CASE, on_rank)):
        for name, grad, whole in zip("qkv", grads, expected[rank][2:], strict=True):
            assert (grad is None) == (name not in wanted)
            assert grad is None or torch.equal(grad, whole)


def test_without_grad_nothing_is_kept() -> None:
    def on_rank(mesh: AttentionMesh) -> tuple[Tensor, bool]:
        (q, k, v), _ = leaves_of(CASE, mesh.rank)
        with torch.no_grad():
            copies = [x.clone() for x in (q, k, v)]
            out = attend(mesh, CASE, *copies)
        assert not out.requires_grad and out.grad_fn is None
        dead = [weakref.ref(x) for x in copies]
        del copies
        mesh.connection.transport.all_gather(torch.zeros(1))  # the others have what they were sent of them
        gc.collect()
        return out, all(ref() is None for ref in dead)

    expected = run_cases([CASE])[0]
    for (out, freed), results in zip(on_ranks(CASE, on_rank), expected, strict=True):
        assert freed and torch.equal(out, results.out)


@pytest.mark.parametrize("used", ["lse", "both"])
def test_gradients_flow_through_lse(used: str) -> None:
    """Against dense attention; padding and rows that see no key take no gradient, whatever comes in there."""
    case = Case(Tile(2, 2), CASE.shape, window_size=(-1, 3), documents=Packed((0, 1, 6, 11)))
    inputs = inputs_of(case.shape, case.dtype, case.seed)
    weight = torch.randn(case.shape.B, case.shape.S, case.shape.H, dtype=torch.float64)

    def loss(out: Tensor, lse: Tensor, do: Tensor, weight: Tensor) -> Tensor:
        through_lse = (lse.masked_fill(lse == -torch.inf, 0.0) * weight.transpose(1, 2)).sum()
        return through_lse if used == "lse" else through_lse + (out * do.nan_to_num()).sum()

    dense = [x.clone().requires_grad_() for x in inputs[:3]]
    expected = torch.autograd.grad(
        loss(*reference.attention(*dense, **case.rule), inputs.do, weight), dense, allow_unused=True
    )

    def on_rank(mesh: AttentionMesh) -> Results:
        q, k, v, do = local_inputs(case, mesh.rank)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        seq, _ = sequences(mesh, case)
        out, lse = ma.mesh_attention(*leaves, seq, causal=True, window_size=(-1, 3), return_lse=True)
        mine = local_rows(case, mesh.rank, weight).nan_to_num(7.0)
        grads = torch.autograd.grad(loss(out, lse, do, mine), leaves, retain_graph=True)
        # A loss may make anything of -inf; it must stay without effect.
        spoilt = torch.ones_like(lse).masked_fill(lse == -torch.inf, torch.nan)
        assert all(x.isfinite().all() for x in torch.autograd.grad(lse, leaves, spoilt))
        return Results(out.detach(), lse.detach(), *grads)

    whole = assemble(case, on_ranks(case, on_rank))
    for name, exact in zip(("dq", "dk", "dv"), expected, strict=True):
        actual = getattr(whole, name)
        assert_close(name, actual, torch.zeros_like(actual) if exact is None else exact)


def test_what_comes_in_through_the_lse_of_an_empty_row_reaches_no_kernel() -> None:
    """Kernels multiply it by the probabilities of the row, which are 0: NaN and infinity would go through."""
    lse, dlse = (
        torch.tensor([[[0.5, -torch.inf, -torch.inf, 2.0]]]),
        torch.tensor([[[3.0, torch.nan, torch.inf, 4.0]]]),
    )
    rows = torch.zeros(1, 4, 1, 8)
    assert row_terms(rows, lse, rows, dlse).tolist() == [[[-3.0, 0.0, 0.0, -4.0]]]


def test_double_backward_is_refused() -> None:
    def on_rank(mesh: AttentionMesh) -> None:
        leaves, do = leaves_of(CASE, mesh.rank)
        out = attend(mesh, CASE, *leaves)
        (dq,) = torch.autograd.grad(out, leaves[:1], do, create_graph=True)
        with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
            torch.autograd.grad(dq.square().sum(), leaves[:1])
        _, lse = attend(mesh, CASE, *leaves, return_lse=True)
        (dq,) = torch.autograd.grad(lse.nan_to_num().sum(), leaves[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
            torch.autograd.grad(dq.square().sum(), leaves[:1])

    on_ranks(CASE, on_rank)


def test_batched_gradients_are_refused() -> None:
    def on_rank(mesh: AttentionMesh) -> None:
        leaves, do = leaves_of(CASE, mesh.rank)
        out = attend(mesh, CASE, *leaves)
        with pytest.raises(ValueError, match="the gradient of out is a Tensor on cpu without memory"):
            torch.autograd.grad(out, leaves, torch.stack([do, do]), is_grads_batched=True, retain_graph=True)
        torch.autograd.grad(out, leaves, do)

    on_ranks(CASE, on_rank)


SAVED = {
    1: ["out", "lse", "sinks", "q", "k", "v"],
    2: ["out", "lse", "sinks", "q", "k", "v", "q", "k", "v", "lse", "q", "k", "v", "lse"],
}


@pytest.mark.parametrize("change", [Tensor.double, lambda x: x[..., :1], lambda x: x.to("meta")])
@pytest.mark.parametrize(
    "heads, number", [(heads, number) for heads, names in SAVED.items() for number in range(len(names))]
)
def test_hooks_that_change_what_is_saved_are_named_on_all_ranks(
    heads: int, number: int, change: Callable[[Tensor], Tensor]
) -> None:
    """Though only one rank has them; what is kept may lie elsewhere meanwhile."""
    name = SAVED[heads][number]

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group, heads=heads, head_groups=heads, timeout=20)
        seq = mesh.sequence(12)
        q, k, v = (torch.randn(1, seq.rows, 4, 8, requires_grad=True) for _ in range(3))
        sinks = torch.zeros(4, requires_grad=True)
        saved = itertools.count()

        def pack(x: Tensor) -> tuple[int, Tensor]:
            return next(saved), x.clone()

        def unpack(packed: tuple[int, Tensor]) -> Tensor:
            at, x = packed
            return change(x) if mesh.rank == 1 and at == number else x.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = ma.mesh_attention(q, k, v, seq, causal=True, sinks=sinks)
        assert isinstance(out, Tensor) and next(saved) == len(SAVED[heads])
        with pytest.raises(ValueError, match=rf"hook on saved tensors has changed {name}, which .* was \["):
            out.sum().backward()

    run_ranks(2, on_rank)


def test_saved_tensors_that_one_rank_has_lost_are_everybodys_error() -> None:
    """Told to the others, which would wait for its gradients; the next call works."""

    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, timeout=20)
        seq = mesh.sequence(6)
        x = torch.randn(1, seq.rows, 2, 8, requires_grad=True)
        out = ma.mesh_attention(x * 1.0, x, x, seq)
        assert isinstance(out, Tensor)
        if mesh.rank == 1:
            with torch.no_grad():
                x.add_(1.0)
        with pytest.raises((ValueError, RuntimeError)) as told:
            out.sum().backward()
        again = ma.mesh_attention(x, x, x, seq)
        assert isinstance(again, Tensor)
        again.sum().backward()
        return str(told.value)

    lost = "one of the variables needed for gradient computation has been modified by an inplace operation"
    others, own = run_ranks(2, on_rank)
    assert others.startswith(f"rank 1: {lost}") and own.startswith(lost)


def test_backward_twice_over_a_retained_graph() -> None:
    def on_rank(mesh: AttentionMesh) -> None:
        leaves, do = leaves_of(CASE, mesh.rank)
        out = attend(mesh, CASE, *leaves)
        first = torch.autograd.grad(out, leaves, do, retain_graph=True)
        second = torch.autograd.grad(out, leaves, do)
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))

    on_ranks(CASE, on_rank)


def test_layers_in_a_row_on_one_mesh() -> None:
    """Two layers, three steps of different lengths; backward passes run in the reverse order."""
    cases = [Case(CASE.tile, Shape(B=1, S=9 + 4 * step, H=2, H_kv=1, D=8), seed=step) for step in range(3)]

    def on_rank(mesh: AttentionMesh) -> list[Results]:
        def layers(case: Case, leaves: Leaves) -> tuple[Tensor, Tensor]:
            q, k, v = leaves
            answer: tuple[Tensor, Tensor] = attend(
                mesh, case, attend(mesh, case, q, k, v), k, v, return_lse=True
            )
            return answer

        return [results_via(case, mesh, partial(layers, case)) for case in cases]

    by_rank = on_ranks(CASE, on_rank)
    for number, case in enumerate(cases):
        whole = assemble(case, [results[number] for results in by_rank])
        q, k, v, do = (x.clone() for x in inputs_of(case.shape, case.dtype, case.seed))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = reference.attention(reference.attention(q, k, v, causal=True)[0], k, v, causal=True)
        expected = Results(out, lse, *torch.autograd.grad(out, leaves, do))
        for name, x, y in zip(Results._fields, whole, expected, strict=True):
            assert_close(f"{case}: {name}", x, y)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_backward_after_close_is_refused(backend: Backend) -> None:
    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group, timeout=20)
        x = torch.ones(1, mesh.sequence(6).rows, 2, 8, requires_grad=True)
        out = ma.mesh_attention(x, x, x, mesh.sequence(6))
        assert isinstance(out, Tensor)
        mesh.close()
        with pytest.raises(ValueError, match="this mesh has been closed"):
            out.sum().backward()

    run_ranks(2, on_rank, backend)
