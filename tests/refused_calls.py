"""Calls that are refused: a user error names the tensor, its size, the rule and the way out, on all ranks and
before any transfer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import meshattn as ma
from meshattn.mesh import AttentionMesh
from meshattn.testing import run_ranks

RANKS, SEQ_LEN, ROWS = 3, 13, 5
Calls = Mapping[str, tuple[Callable[[AttentionMesh], Any], tuple[str, ...]]]
"""By name, a wrong call and what its message must hold."""


class OfSeveralRanks(Tensor):
    """Looks like a DTensor."""

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)


def attend(mesh: AttentionMesh, q: Any = None, k: Any = None, v: Any = None, **options: Any) -> Any:
    plain = torch.ones(2, ROWS, 4, 8)
    q, k, v = (plain if x is None else x for x in (q, k, v))
    return ma.mesh_attention(q, k, v, mesh.sequence(SEQ_LEN), **options)


def ones(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(size, dtype=dtype)


def check_refused(calls: Calls, name: str) -> None:
    """When all ranks make the call."""
    call, fragments = calls[name]

    def on_rank(group: Any) -> tuple[str, int]:
        mesh = ma.init_attention_mesh(group, timeout=20)
        with pytest.raises(ValueError) as info:
            call(mesh)
        before = len(mesh.traffic())
        attend(mesh)  # the mesh works on
        return str(info.value), before

    answers = run_ranks(RANKS, on_rank)
    assert len({text for text, _ in answers}) == 1, "all ranks say the same"
    text, transfers = answers[0]
    assert transfers == 0, "refused before any transfer"
    for fragment in fragments:
        assert fragment in text


def check_refused_on_all(calls: Calls, name: str) -> None:
    """When one rank makes the call: nothing that it is given may stop it on the way to the others."""
    call, fragments = calls[name]

    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, timeout=5)
        with pytest.raises(ValueError) as info:
            (call if mesh.rank == 1 else attend)(mesh)
        attend(mesh)
        return str(info.value)

    for rank, text in enumerate(run_ranks(RANKS, on_rank)):
        assert rank == 1 or text.startswith("rank 1: ")
        for fragment in fragments:
            assert fragment in text
