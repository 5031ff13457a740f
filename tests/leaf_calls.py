"""Calls on the leaves of a rank, for what autograd and its companions do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import meshattn as ma
from cases import Results, Shape
from distributed import local_rows
from mesh_cases import Case, inputs_of
from meshattn.mesh import AttentionMesh
from meshattn.plan.assignment import Tile
from meshattn.testing import run_ranks

CASE = Case(Tile(2, 2), Shape(B=2, S=14, H=4, H_kv=2, D=8, D_v=16))
Leaves = tuple[Tensor, Tensor, Tensor]


def leaves_of(case: Case, rank: int) -> tuple[Leaves, Tensor]:
    """This rank's q, k, v, which require grad, and do."""
    q, k, v, do = (local_rows(case, rank, x) for x in inputs_of(case.shape, case.dtype, case.seed))
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), do


def attend(mesh: AttentionMesh, case: Case, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return ma.mesh_attention(q, k, v, mesh.sequence(case.shape.S), causal=case.causal, **options)


def on_ranks(case: Case, fn: Callable[[AttentionMesh], Any]) -> list[Any]:
    return run_ranks(case.ranks, lambda group: fn(ma.init_attention_mesh(group, tile=case.tile)))


def results_via(case: Case, mesh: AttentionMesh, call: Callable[[Leaves], tuple[Tensor, Tensor]]) -> Results:
    """Results of a rank when the attention is called by ``call``."""
    leaves, do = leaves_of(case, mesh.rank)
    out, lse = call(leaves)
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, do))
