"""What comes with autograd: autocast, activation checkpointing, torch.compile."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import meshattn as ma
from cases import Results, Shape
from distributed import assert_equals_oracle, assert_same_bits, run_cases
from leaf_calls import CASE, Leaves, attend, leaves_of, on_ranks, results_via
from mesh_cases import Case
from meshattn import calls
from meshattn.mesh import AttentionMesh
from meshattn.plan.assignment import Tile
from meshattn.testing import run_ranks
from meshattn_kernels.reference import ReferenceKernel


def test_autocast_takes_its_type() -> None:
    """Under autocast float32 (and mixed) inputs become bfloat16; the gradients come back in float32."""
    case = Case(Tile(1, 3), CASE.shape, dtype=torch.float32)
    low = Case(case.tile, case.shape, dtype=torch.bfloat16)

    def on_rank(mesh: AttentionMesh) -> Results:
        (q, k, v), do = leaves_of(case, mesh.rank)
        with torch.autocast("cpu", torch.bfloat16):
            out, lse = attend(mesh, case, q, k.bfloat16(), v, return_lse=True)
        return Results(out.detach(), lse, *torch.autograd.grad(out, (q, k, v), do.bfloat16()))

    by_rank = on_ranks(case, on_rank)
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
        (q, k, v), do = leaves_of(CASE, mesh.rank)
        with torch.autocast("cpu", torch.bfloat16):
            torch.autograd.grad(attend(mesh, CASE, q, k, v), (q, k, v), do)

    on_ranks(CASE, on_rank)
    assert set(seen) == {("forward", False), ("backward", False)}


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    """The recomputed forward pass is one more call on every rank; the results do not change."""

    def on_rank(mesh: AttentionMesh) -> Results:
        def call(leaves: Leaves) -> tuple[Tensor, Tensor]:
            def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                answer: tuple[Tensor, Tensor] = attend(mesh, CASE, q * 1, k * 1, v * 1, return_lse=True)
                return answer

            answer: tuple[Tensor, Tensor] = checkpoint(layer, *leaves, use_reentrant=use_reentrant)
            return answer

        if not use_reentrant:
            return results_via(CASE, mesh, call)
        leaves, do = leaves_of(CASE, mesh.rank)  # the reentrant form works with backward() alone
        out, lse = call(leaves)
        out.backward(do)
        return Results(out.detach(), lse.detach(), *(leaf.grad for leaf in leaves))

    assert_same_bits(on_ranks(CASE, on_rank), run_cases([CASE])[0])


COMPILED_AUTOGRAD = """
import torch, meshattn as ma
from meshattn.testing import run_ranks

def on_rank(group):
    seq = ma.init_attention_mesh().sequence(9)
    x = torch.randn(2, seq.rows, 2, 8, requires_grad=True)

    def step():
        y = x * 2.0
        ma.mesh_attention(y, y, y, seq, causal=True).square().sum().backward()
        gradient, x.grad = x.grad, None
        return gradient

    plain = step()
    with torch._dynamo.config.patch(compiled_autograd=True):
        return torch.equal(torch.compile(step, backend="eager")(), plain)

assert run_ranks(2, on_rank, "gloo") == [True, True]
"""


def test_compiled_backward_passes() -> None:
    """Compiled autograd leaves its graph there. In a process whose `torch.empty` is that of PyTorch."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED_AUTOGRAD], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]


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
            results_via(case, mesh, lambda leaves, fn=fn: fn(*leaves)) for fn in (compiled, layer)
        )

    for compiled, plain in run_ranks(tile.ranks, on_rank, "threads" if tile.ranks == 1 else "gloo"):
        assert_same_bits([compiled], [plain])
