"""The edge to autograd: views, partial gradients, autocast, compile, checkpointing; the same bits always."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import meshattn as ma
from cases import Results, Shape
from distributed import (
    Backend,
    assemble,
    assert_equals_oracle,
    assert_same_bits,
    local_inputs,
    local_rows,
    run_cases,
    sequences,
)
from mesh_cases import Case, Packed, inputs_of
from meshattn import calls, reference
from meshattn.engine import row_terms
from meshattn.mesh import AttentionMesh
from meshattn.plan.assignment import Tile
from meshattn.testing import run_ranks
from meshattn_kernels.reference import ReferenceKernel
from tolerance import assert_close

CASE = Case(Tile(2, 2), Shape(B=2, S=14, H=4, H_kv=2, D=8, D_v=16))
Leaves = tuple[Tensor, Tensor, Tensor]


def _leaves(case: Case, rank: int) -> tuple[Leaves, Tensor]:
    q, k, v, do = (local_rows(case, rank, x) for x in inputs_of(case.shape, case.dtype, case.seed))
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), do


def _attend(mesh: AttentionMesh, case: Case, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return ma.mesh_attention(q, k, v, mesh.sequence(case.shape.S), causal=case.causal, **options)


def _on_ranks(case: Case, fn: Callable[[AttentionMesh], Any]) -> list[Any]:
    return run_ranks(case.ranks, lambda group: fn(ma.init_attention_mesh(group, tile=case.tile)))


def _via(case: Case, mesh: AttentionMesh, call: Callable[[Leaves], tuple[Tensor, Tensor]]) -> Results:
    """Results of a rank when the attention is called by ``call``."""
    leaves, do = _leaves(case, mesh.rank)
    out, lse = call(leaves)
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, do))


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
        (q, k, v), do = _leaves(case, mesh.rank)
        out, lse = _attend(mesh, case, view(q), view(k), view(v), return_lse=True)
        assert not view(do).is_contiguous() or view(do).is_neg()
        return Results(out.detach(), lse, *torch.autograd.grad(out, (q, k, v), view(do)))

    assert_same_bits(_on_ranks(case, on_rank), plain)


def test_expanded_inputs_and_gradients() -> None:
    """``out.sum()`` sends back one number with all strides 0; one head of q and k may stand for all."""
    case = Case(Tile(2, 2), Shape(B=2, S=12, H=4, H_kv=4, D=8))

    def on_rank(mesh: AttentionMesh) -> tuple[Results, Results]:
        (q, k, v), _ = _leaves(case, mesh.rank)
        pair = []
        for spread in (lambda x: x.expand(-1, -1, 4, -1), lambda x: x.repeat(1, 1, 4, 1)):
            heads = [x.detach()[:, :, :1].clone().requires_grad_() for x in (q, k, v)]
            out, lse = _attend(mesh, case, *map(spread, heads), return_lse=True)
            do = torch.ones(()).double().expand(out.shape) if not pair else torch.ones_like(out)
            pair.append(Results(out.detach(), lse, *torch.autograd.grad(out, heads, do)))
        return pair[0], pair[1]

    for expanded, repeated in _on_ranks(case, on_rank):
        assert_same_bits([expanded], [repeated])


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv", "kv"])
def test_only_some_inputs_require_grad(wanted: str) -> None:
    expected = run_cases([CASE])[0]

    def on_rank(mesh: AttentionMesh) -> list[Tensor | None]:
        leaves, do = _leaves(CASE, mesh.rank)
        for name, leaf in zip("qkv", leaves, strict=True):
            leaf.requires_grad_(name in wanted)
        _attend(mesh, CASE, *leaves).backward(do)
        return [leaf.grad for leaf in leaves]

    for rank, grads in enumerate(_on_ranks(CASE, on_rank)):
        for name, grad, whole in zip("qkv", grads, expected[rank][2:], strict=True):
            assert (grad is None) == (name not in wanted)
            assert grad is None or torch.equal(grad, whole)


def test_without_grad_nothing_is_kept() -> None:
    def on_rank(mesh: AttentionMesh) -> tuple[Tensor, bool]:
        (q, k, v), _ = _leaves(CASE, mesh.rank)
        with torch.no_grad():
            copies = [x.clone() for x in (q, k, v)]
            out = _attend(mesh, CASE, *copies)
        assert not out.requires_grad and out.grad_fn is None
        dead = [weakref.ref(x) for x in copies]
        del copies
        mesh.connection.transport.all_gather(torch.zeros(1))  # the others have what they were sent of them
        gc.collect()
        return out, all(ref() is None for ref in dead)

    expected = run_cases([CASE])[0]
    for (out, freed), results in zip(_on_ranks(CASE, on_rank), expected, strict=True):
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

    whole = assemble(case, _on_ranks(case, on_rank))
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
        leaves, do = _leaves(CASE, mesh.rank)
        out = _attend(mesh, CASE, *leaves)
        (dq,) = torch.autograd.grad(out, leaves[:1], do, create_graph=True)
        with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
            torch.autograd.grad(dq.square().sum(), leaves[:1])
        _, lse = _attend(mesh, CASE, *leaves, return_lse=True)
        (dq,) = torch.autograd.grad(lse.nan_to_num().sum(), leaves[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
            torch.autograd.grad(dq.square().sum(), leaves[:1])

    _on_ranks(CASE, on_rank)


def test_batched_gradients_are_refused() -> None:
    def on_rank(mesh: AttentionMesh) -> None:
        leaves, do = _leaves(CASE, mesh.rank)
        out = _attend(mesh, CASE, *leaves)
        with pytest.raises(ValueError, match="the gradient of out is a Tensor on cpu without memory"):
            torch.autograd.grad(out, leaves, torch.stack([do, do]), is_grads_batched=True, retain_graph=True)
        torch.autograd.grad(out, leaves, do)

    _on_ranks(CASE, on_rank)


def test_backward_twice_over_a_retained_graph() -> None:
    def on_rank(mesh: AttentionMesh) -> None:
        leaves, do = _leaves(CASE, mesh.rank)
        out = _attend(mesh, CASE, *leaves)
        first = torch.autograd.grad(out, leaves, do, retain_graph=True)
        second = torch.autograd.grad(out, leaves, do)
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))

    _on_ranks(CASE, on_rank)


def test_autocast_takes_its_type() -> None:
    """Under autocast float32 (and mixed) inputs become bfloat16; the gradients come back in float32."""
    case = Case(Tile(1, 3), CASE.shape, dtype=torch.float32)
    low = Case(case.tile, case.shape, dtype=torch.bfloat16)

    def on_rank(mesh: AttentionMesh) -> Results:
        (q, k, v), do = _leaves(case, mesh.rank)
        with torch.autocast("cpu", torch.bfloat16):
            out, lse = _attend(mesh, case, q, k.bfloat16(), v, return_lse=True)
        return Results(out.detach(), lse, *torch.autograd.grad(out, (q, k, v), do.bfloat16()))

    by_rank = _on_ranks(case, on_rank)
    assert all([x.dtype for x in results] == [torch.bfloat16, *[torch.float32] * 4] for results in by_rank)
    rounded = [
        Results(*(x if n == 1 else x.bfloat16() for n, x in enumerate(results))) for results in by_rank
    ]
    # The same draws, rounded: bfloat16 inputs of the same seed.
    assert_equals_oracle(low, rounded)


def test_no_kernel_runs_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would round what the engine gives it in the accumulator type."""
    seen: list[tuple[str, bool]] = []

    class Watched(ReferenceKernel):
        def forward(self, *given: Any, **how: Any) -> None:
            seen.append(("forward", torch.is_autocast_enabled("cpu")))
            super().forward(*given, **how)

        def backward(self, *given: Any, **how: Any) -> None:
            seen.append(("backward", torch.is_autocast_enabled("cpu")))
            super().backward(*given, **how)

    monkeypatch.setattr(calls, "get_kernel", lambda *_: Watched())

    def on_rank(mesh: AttentionMesh) -> None:
        (q, k, v), do = _leaves(CASE, mesh.rank)
        with torch.autocast("cpu", torch.bfloat16):
            torch.autograd.grad(_attend(mesh, CASE, q, k, v), (q, k, v), do)

    _on_ranks(CASE, on_rank)
    assert set(seen) == {("forward", False), ("backward", False)}


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    """The recomputed forward pass is one more call on every rank; the results do not change."""

    def on_rank(mesh: AttentionMesh) -> Results:
        def call(leaves: Leaves) -> tuple[Tensor, Tensor]:
            def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                answer: tuple[Tensor, Tensor] = _attend(mesh, CASE, q * 1, k * 1, v * 1, return_lse=True)
                return answer

            answer: tuple[Tensor, Tensor] = checkpoint(layer, *leaves, use_reentrant=use_reentrant)
            return answer

        if not use_reentrant:
            return _via(CASE, mesh, call)
        leaves, do = _leaves(CASE, mesh.rank)  # the reentrant form works with backward() alone
        out, lse = call(leaves)
        out.backward(do)
        return Results(out.detach(), lse.detach(), *(leaf.grad for leaf in leaves))

    assert_same_bits(_on_ranks(CASE, on_rank), run_cases([CASE])[0])


@pytest.mark.parametrize("tile", [Tile(1, 1), Tile(1, 2)], ids=str)
def test_compiled_callers(tile: Tile) -> None:
    """torch.compile leaves its graph at the call and gives what the plain function gives."""
    case = Case(tile, Shape(B=1, S=7, H=2, H_kv=1, D=8))

    def on_rank(group: Any) -> tuple[Results, Results]:
        mesh = ma.init_attention_mesh(group if tile.ranks == 1 else None, tile=tile)
        seq = mesh.sequence(case.shape.S)

        def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            answer = ma.mesh_attention(q * 2.0, k, v + 1.0, seq, causal=True, return_lse=True)
            return answer[0] * 0.5, answer[1]

        compiled = torch.compile(layer, backend="aot_eager")
        return tuple(  # type: ignore[return-value]
            _via(case, mesh, lambda leaves, fn=fn: fn(*leaves)) for fn in (compiled, layer)
        )

    for compiled, plain in run_ranks(tile.ranks, on_rank, "threads" if tile.ranks == 1 else "gloo"):
        assert_same_bits([compiled], [plain])


BITS = [
    Case(tile, CASE.shape, layout, dtype=dtype)
    for tile, layout in [(Tile(1, 4), "striped"), (Tile(2, 2), "zigzag"), (Tile(4, 1), "contiguous")]
    for dtype in (torch.float32, torch.bfloat16)
]


def digest(runs: list[list[Results]]) -> str:
    """Sums of the bytes of all results, weighted so that their order counts."""

    def weighted(x: Tensor) -> int:
        data = x.contiguous().view(torch.uint8).flatten().long()
        return int((data * torch.arange(1, len(data) + 1)).sum())

    return str([[weighted(x) for results in by_rank for x in results] for by_rank in runs])


def test_same_bits_on_three_runs_and_in_a_fresh_process() -> None:
    first = run_cases(BITS)
    for _ in range(2):
        for mine, again in zip(first, run_cases(BITS), strict=True):
            assert_same_bits(mine, again)
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import torch; "
        "torch.set_num_threads(1); from test_autograd import BITS, digest, run_cases; "
        "print(digest(run_cases(BITS)))"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == digest(first)


def test_bits_see_a_change_of_one_bit() -> None:
    """The negative control of the tests above."""
    (by_rank,) = run_cases([BITS[0]])
    changed = by_rank[0]._replace(dq=by_rank[0].dq.clone())
    changed.dq.view(torch.int32).flatten()[3] ^= 1
    with pytest.raises(AssertionError, match="dq of rank 0"):
        assert_same_bits([changed, *by_rank[1:]], by_rank)
    assert_equals_oracle(BITS[0], [changed, *by_rank[1:]])


def test_layers_in_a_row_on_one_mesh() -> None:
    """Two layers, three steps of different lengths; backward passes run in the reverse order."""
    cases = [Case(CASE.tile, Shape(B=1, S=9 + 4 * step, H=2, H_kv=1, D=8), seed=step) for step in range(3)]

    def on_rank(mesh: AttentionMesh) -> list[Results]:
        def layers(case: Case, leaves: Leaves) -> tuple[Tensor, Tensor]:
            q, k, v = leaves
            answer: tuple[Tensor, Tensor] = _attend(
                mesh, case, _attend(mesh, case, q, k, v), k, v, return_lse=True
            )
            return answer

        return [_via(case, mesh, partial(layers, case)) for case in cases]

    by_rank = _on_ranks(CASE, on_rank)
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
