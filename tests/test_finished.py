"""Kernels that write finished results: only on a mesh of one rank, and with the bits of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import pytest
import torch
from torch import Tensor

import meshattn as ma
from cases import Shape
from distributed import assert_same_bits, run_cases
from mesh_cases import Case
from meshattn import calls
from meshattn.plan.assignment import Tile
from meshattn.testing import run_ranks
from meshattn_kernels.contract import AccumulatorKind, ChunkSizes, Shapes, heads_first, rows_first
from meshattn_kernels.reference import ReferenceKernel


@dataclass(frozen=True)
class FinishingKernel(ReferenceKernel):
    """The reference kernel, but for the memory that out, dk and dv are written to; records the types of that
    memory."""

    writes_finished: ClassVar[frozenset[AccumulatorKind]] = frozenset({"out", "dkv"})
    seen: ClassVar[list[torch.dtype]] = []

    def accumulator_shapes(self, kind: AccumulatorKind, **sizes: Unpack[ChunkSizes]) -> Shapes:
        """dk and dv as in results, where the reference kernel has heads first."""
        return (rows_first if kind == "dkv" else heads_first)(kind, **sizes)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, acc: Mapping[str, Tensor], *rest: Any, **how: Any
    ) -> None:
        out = acc["out"]
        self.seen.append(out.dtype)
        exact = {"out": out.to(acc["lse"].dtype), "lse": acc["lse"]}
        super().forward(q, k, v, exact, *rest, **how)
        out.copy_(exact["out"])

    def backward(self, *given: Any, softmax_scale: float, **how: Any) -> None:
        *before, dkv, intervals = given
        self.seen.append(dkv["dk"].dtype)
        exact = {name: tensor.transpose(1, 2).float().contiguous() for name, tensor in dkv.items()}
        super().backward(*before, exact, intervals, softmax_scale=softmax_scale, **how)
        results: Iterable[Tensor] = (result.transpose(1, 2) for result in exact.values())
        if dkv["dk"].dtype == torch.bfloat16:
            results = super().finish("dkv", exact, dtype=torch.bfloat16, softmax_scale=softmax_scale)
        for tensor, result in zip(dkv.values(), results, strict=True):
            tensor.copy_(result)

    def finish(
        self, kind: AccumulatorKind, acc: Mapping[str, Tensor], *, dtype: torch.dtype, **how: Any
    ) -> tuple[Tensor, ...]:
        if kind == "dkv":
            acc = {name: tensor.transpose(1, 2) for name, tensor in acc.items()}
            plus = how.pop("plus")
            how["plus"] = plus and {name: tensor.transpose(1, 2) for name, tensor in plus.items()}
        return super().finish(kind, acc, dtype=dtype, **how)


@pytest.mark.parametrize("tile", [Tile(1, 1), Tile(1, 2), Tile(2, 1)], ids=str)
@pytest.mark.parametrize("seq_len", [1, 37])
def test_one_rank_gets_what_the_kernel_wrote(
    tile: Tile, seq_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tile, Shape(B=2, S=seq_len, H=4, H_kv=2, D=8), dtype=torch.bfloat16)
    (expected,) = run_cases([case])
    FinishingKernel.seen.clear()
    monkeypatch.setattr(calls, "get_kernel", lambda *_: FinishingKernel())
    (finished,) = run_cases([case])
    assert_same_bits(finished, expected)
    assert set(FinishingKernel.seen) == {torch.bfloat16 if tile.ranks == 1 else torch.float32}


@pytest.mark.parametrize("heads", [1, 2], ids="heads{}".format)
def test_float32_is_always_accumulated_and_finished_afterwards(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel tells by the type of the memory whether it is to scale dq and dk: there it cannot."""
    case = Case(Tile(1, 1), Shape(B=2, S=37, H=4, H_kv=2, D=8), dtype=torch.float32, heads=heads)
    (expected,) = run_cases([case])
    monkeypatch.setattr(calls, "get_kernel", lambda *_: FinishingKernel())
    (finished,) = run_cases([case])
    assert_same_bits(finished, expected)


def test_parts_of_gradients_that_are_still_to_be_added_up_are_not_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks of a head axis have a copy each of the one key/value head, and a tile of one rank; the sum of
    both has the bits that it has with any kernel."""
    case = Case(Tile(1, 1), Shape(B=2, S=37, H=4, H_kv=1, D=8), dtype=torch.bfloat16, heads=2)
    (expected,) = run_cases([case])
    FinishingKernel.seen.clear()
    monkeypatch.setattr(calls, "get_kernel", lambda *_: FinishingKernel())
    (finished,) = run_cases([case])
    assert_same_bits(finished, expected)
    assert set(FinishingKernel.seen) == {torch.bfloat16, torch.float32}, "of out, and of dk and dv"


@pytest.mark.parametrize("tile", [Tile(1, 1), Tile(1, 2), Tile(2, 1)], ids=str)
def test_results_are_no_views(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view would keep the whole accumulator alive, and may not be changed in place."""
    monkeypatch.setattr(calls, "get_kernel", lambda *_: FinishingKernel())

    def on_rank(group: Any) -> None:
        seq = ma.init_attention_mesh(group, tile=tile).sequence(5)
        x = torch.ones(1, seq.rows, 2, 8, dtype=torch.bfloat16, requires_grad=True)
        for result in ma.mesh_attention(x, x, x, seq, return_lse=True):
            assert not result._is_view() and result.untyped_storage().nbytes() == result.nbytes

    run_ranks(tile.ranks, on_rank)
