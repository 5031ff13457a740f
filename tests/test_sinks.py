"""Attention sinks: against a dense softmax with one more column, for any mask, tile and number of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import meshattn as ma
from cases import Results, Shape
from distributed import local_inputs, sequences
from mask_cases import mask_cases
from mesh_cases import Case, Packed, inputs_of, sinks_of
from meshattn import reference
from meshattn.plan.assignment import Tile, tiles
from meshattn.sinks import add_sinks
from meshattn.testing import run_ranks
from sink_runs import dense, run
from tolerance import assert_close

CASE = Case(Tile(2, 2), Shape(B=2, S=14, H=4, H_kv=2, D=8, D_v=16))


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(mask_cases())
def test_any_mask_with_sinks(case: Case) -> None:
    """The gradients of the ranks sum to that of the dense one: every row counts once."""
    whole, by_rank = run(case, sinks_of(case))
    expected, dsinks = dense(case)
    for name in Results._fields:
        assert_close(f"{case}: {name}", getattr(whole, name), getattr(expected, name))
    assert_close(f"{case}: dsinks", torch.stack(by_rank).sum(0), dsinks)


def test_the_dense_one_is_a_key_without_value() -> None:
    """The oracle against attention over one more key, of score s and value 0."""
    q, k, v, _ = inputs_of(Shape(B=1, S=5, H=2, H_kv=2, D=8), torch.float64, 0)
    sinks = torch.tensor([0.7, -1.2], dtype=torch.float64)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * 8**-0.5
    weights = scores.exp()
    total = weights.sum(-1) + sinks.exp()[:, None]
    out, lse = reference.attention(q, k, v, sinks=sinks)
    assert torch.allclose(lse, total.log(), atol=1e-13)
    assert torch.allclose(out, torch.einsum("bhst,bthd->bshd", weights / total[..., None], v), atol=1e-13)


def test_a_sink_far_below_changes_nothing_and_one_far_above_takes_all() -> None:
    plain, _ = run(CASE, None)
    low, dlow = run(CASE, torch.full((4,), -1e4, dtype=torch.float64))
    assert all(torch.equal(x, y) for x, y in zip(plain, low, strict=True))
    assert not torch.stack(dlow).any()
    high, _ = run(CASE, torch.full((4,), 1e4, dtype=torch.float64))
    assert not high.out.any() and not high.dv.any() and (high.lse == 1e4).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_lower_types_and_bits(dtype: torch.dtype) -> None:
    """Sinks in float32 beside any type; the same bits on every run, and on a ring those of (1, P)."""
    case = Case(Tile(1, 3), CASE.shape, dtype=dtype, documents=Packed((0, 3, 12)))
    ring = Case(Tile(3, 1), CASE.shape, dtype=dtype, documents=Packed((0, 3, 12)), ring=True)
    sinks = torch.tensor([0.3, -0.5, 1.0, 0.0])
    first, dsinks = run(case, sinks)
    for other, again in (run(case, sinks), run(ring, sinks)):
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(dsinks, again, strict=True))
    assert dsinks[0].dtype == torch.float32
    exact = reference.attention(
        *(x.double() for x in inputs_of(case.shape, dtype, 0)[:3]), sinks=sinks.double(), **case.rule
    )[0]
    assert (first.out.double() - exact).abs().max() < 8 * torch.finfo(dtype).eps


def test_gradient_of_the_sinks_alone_and_of_lse() -> None:
    """q, k and v are constants; the loss is made of lse."""

    def on_rank(group: Any) -> Tensor:
        mesh = ma.init_attention_mesh(group, tile=CASE.tile)
        q, k, v, _ = local_inputs(CASE, mesh.rank)
        sinks = sinks_of(CASE).requires_grad_()
        _, lse = ma.mesh_attention(
            q, k, v, sequences(mesh, CASE)[0], causal=True, sinks=sinks, return_lse=True
        )
        lse.masked_fill(lse == -torch.inf, 0.0).sum().backward()
        assert sinks.grad is not None
        return sinks.grad

    q, k, v, _ = inputs_of(CASE.shape, CASE.dtype, CASE.seed)
    sinks = sinks_of(CASE).requires_grad_()
    (expected,) = torch.autograd.grad(reference.attention(q, k, v, causal=True, sinks=sinks)[1].sum(), sinks)
    assert_close("dsinks", torch.stack(run_ranks(4, on_rank)).sum(0), expected)


@pytest.mark.parametrize("tile", [*tiles(4), Tile(2, 3)], ids=str)
def test_the_whole_gradient_on_every_rank(tile: Tile) -> None:
    """Of a replicated weight: each row counts once, whatever the tile, and all ranks have the same bits."""
    case = replace(CASE, tile=tile, causal=False)

    def on_rank(group: Any) -> Tensor:
        mesh = ma.init_attention_mesh(group, tile=tile)
        *leaves, do = local_inputs(case, mesh.rank)
        sinks = sinks_of(case).requires_grad_()
        seq, _ = sequences(mesh, case)
        out = ma.mesh_attention(*leaves, seq, sinks=ma.replicated(sinks, mesh))
        (dsinks,) = torch.autograd.grad(out, sinks, do)
        return dsinks

    first, *others = run_ranks(case.ranks, on_rank)
    assert_close("dsinks", first, dense(case)[1])
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("dtype", "first"), [(torch.bfloat16, 256.0), (torch.float8_e5m2, 8.0)], ids=["bfloat16", "float8"]
)
def test_parts_are_rounded_when_they_are_added_up(dtype: torch.dtype, first: float) -> None:
    """Not before: 256 + 1 is 256 in bfloat16, and 8 + 1 is 8 in float8_e5m2."""

    def on_rank(group: Any) -> Tensor:
        mesh = ma.init_attention_mesh(group)
        weight = torch.ones(1, dtype=dtype, requires_grad=True)
        part = ma.replicated(weight, mesh).float() * (first if mesh.rank == 0 else 1)
        return torch.autograd.grad(part.sum(), weight)[0]

    for found in run_ranks(4, on_rank, "gloo"):
        assert found.dtype == dtype and torch.equal(
            found.float(), torch.tensor([first + 3]).to(dtype).float()
        )


def test_parts_are_added_up_in_the_order_of_the_ranks() -> None:
    parts = 1.0, 1e8, -1e8  # in float32 the first is lost in the second

    def on_rank(group: Any) -> Tensor:
        mesh = ma.init_attention_mesh(group)
        weight = torch.ones(1, requires_grad=True)
        return torch.autograd.grad((ma.replicated(weight, mesh) * parts[mesh.rank]).sum(), weight)[0]

    assert [float(x) for x in run_ranks(3, on_rank)] == [0.0] * 3


def test_what_cannot_be_replicated_is_refused() -> None:
    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group)
        for weight, words in (
            (3.0, "weight is float"),
            (torch.ones(2).int(), r"weight is torch\.int32"),
            (torch.ones(2).to_sparse(), r"weight is torch\.sparse_coo: it must be a dense tensor"),
        ):
            with pytest.raises(ValueError, match=words):
                ma.replicated(weight, mesh)  # type: ignore[arg-type]
        weight = torch.ones(2, requires_grad=True)
        (gradient,) = torch.autograd.grad(
            ma.replicated(weight, mesh).square().sum(), weight, create_graph=True
        )
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()
        whole = ma.replicated(weight, mesh).sum()
        mesh.close()
        with pytest.raises(ValueError, match="this mesh has been closed"):
            whole.backward()

    run_ranks(1, on_rank)


def test_double_backward_through_sinks_is_refused() -> None:
    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group, tile=CASE.tile)
        q, k, v, do = local_inputs(CASE, mesh.rank)
        sinks = sinks_of(CASE).requires_grad_()
        out = ma.mesh_attention(q.requires_grad_(), k, v, sequences(mesh, CASE)[0], causal=True, sinks=sinks)
        dq, dsinks = torch.autograd.grad(out, (q, sinks), do, create_graph=True)
        for gradient in (dq, dsinks):
            with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
                torch.autograd.grad(gradient.square().sum(), sinks, retain_graph=True)

    run_ranks(4, on_rank)


def test_a_finished_out_is_scaled_by_an_exact_factor() -> None:
    """Kernels may leave out in the type of the inputs: the factor is not rounded to that."""
    out = torch.randn(2, 9, 3, 8, dtype=torch.float64).bfloat16()
    lse, sinks = torch.randn(2, 3, 9), torch.tensor([0.5, -1.0, 3.0])
    factor = torch.sigmoid(lse - sinks[:, None]).transpose(1, 2)[..., None]
    expected = (out.float() * factor).bfloat16()
    add_sinks({"out": out, "lse": lse}, sinks)
    assert float((out != expected).double().mean()) < 0.02
