"""The local kernel of a call: named or chosen, the same on all ranks, and visible."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import meshattn as ma
from cases import Shape
from distributed import assert_same_bits, check_cases, run_cases
from mesh_cases import Case
from meshattn import calls
from meshattn.layouts import LayoutKind
from meshattn.plan.assignment import Tile
from meshattn.testing import run_ranks

RANKS = 3
CASE = Case(Tile(1, 2), Shape(B=1, S=13, H=4, H_kv=2, D=8, D_v=16))


def attend(mesh: ma.AttentionMesh, **options: Any) -> Any:
    seq = mesh.sequence(12)
    x = torch.ones(1, seq.rows, 2, 8, requires_grad=True)
    return ma.mesh_attention(x, x, x, seq, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_cpu_takes_the_reference_kernel(dtype: torch.dtype) -> None:
    assert ma.kernel_for("cpu", dtype, 40) == ma.kernel_for(torch.device("cpu"), dtype, 8, 24) == "reference"
    assert ma.kernel_for("cpu", dtype, 40, kernel="sdpa") == "sdpa"
    with pytest.raises(ValueError, match="q and k have head size 40 and v 48; kernel 'sdpa'"):
        ma.kernel_for("cpu", dtype, 40, 48, kernel="sdpa")
    for option in ("softcap", "dropout_p"):
        with pytest.raises(ValueError, match=f"{option} is not 0; kernel 'sdpa' has no"):
            ma.kernel_for("cpu", dtype, 40, kernel="sdpa", **{option: 0.5})


def test_a_name_and_the_choice_of_the_same_kernel_agree() -> None:
    default, named = run_cases([CASE])[0], run_cases([CASE], kernel="reference")[0]
    assert_same_bits(default, named)

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group, timeout=20)
        attend(mesh, kernel="reference" if mesh.rank == 1 else None)

    run_ranks(RANKS, on_rank)


def test_ranks_that_choose_other_kernels_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks do whose GPUs or versions of triton differ."""
    here = threading.local()
    monkeypatch.setattr(calls, "choose_kernel", lambda *_, **__: here.kernel)

    def on_rank(group: Any) -> int:
        mesh = ma.init_attention_mesh(group, timeout=20)
        here.kernel = "sdpa" if mesh.rank == 1 else "reference"
        with pytest.raises(
            ma.RankMismatchError, match="kernel is sdpa on rank 1, but reference on ranks 0, 2"
        ):
            attend(mesh, deterministic=False)
        return len(mesh.traffic())

    assert run_ranks(RANKS, on_rank) == [0] * RANKS


def test_one_rank_that_cannot_serve_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    choose = calls.choose_kernel

    def chosen(*request: Any, **rule: Any) -> str:
        return choose("hopper", *request[1:], **rule) if here.odd else choose(*request, **rule)

    monkeypatch.setattr(calls, "choose_kernel", chosen)

    def on_rank(group: Any) -> int:
        mesh = ma.init_attention_mesh(group, timeout=20)
        here.odd = mesh.rank == 1
        with pytest.raises(ValueError, match=r"q is on cpu; kernel 'hopper' .* Choose kernel='reference'"):
            attend(mesh)
        return len(mesh.traffic())

    assert run_ranks(RANKS, on_rank) == [0] * RANKS


def test_a_gradient_through_lse_is_refused_where_it_would_be_lost() -> None:
    """Where do is 0, the product of do and out can say nothing of lse."""

    def on_rank(group: Any) -> None:
        seq = ma.init_attention_mesh(group, timeout=20).sequence(12)
        x = torch.ones(1, seq.rows, 2, 8, requires_grad=True)
        for kernel in ("sdpa", None):
            answer = ma.mesh_attention(x, x, x, seq, return_lse=True, kernel=kernel, deterministic=False)
            out, lse = answer
            out.sum().backward(retain_graph=True)
            if kernel is None:
                lse.sum().backward()
            else:
                with pytest.raises(NotImplementedError, match="lse, which kernel 'sdpa' cannot take"):
                    lse.sum().backward()

    run_ranks(RANKS, on_rank)


@pytest.mark.parametrize("layout", ["striped", "contiguous"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_torch_s_flash_attention_through_the_engine(
    layout: LayoutKind, causal: bool, dtype: torch.dtype
) -> None:
    shape = Shape(B=2, S=61, H=4, H_kv=2, D=16)
    cases = [Case(Tile(a, 4 // a), shape, layout, causal, dtype) for a in (1, 2, 4)]
    check_cases(cases, kernel="sdpa", deterministic=False)
