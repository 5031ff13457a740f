"""Runs of cases with sinks whose gradient is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cases import Results
from distributed import assemble, build_mesh, run_with_sinks
from mesh_cases import Case, inputs_of, score_options, sinks_of
from meshattn import reference
from meshattn.testing import run_ranks


def run(
    case: Case, sinks: Tensor | None, *, device: str = "cpu", timeout: float = 100.0, **options: Any
) -> tuple[Results, list[Tensor]]:
    """Global results, and the gradient of the sinks on every rank."""

    def on_rank(group: Any) -> tuple[Results, Tensor]:
        own = None if sinks is None else sinks.to(device, copy=True).requires_grad_()
        mesh = build_mesh(group, case, timeout=timeout)
        results, dsinks = run_with_sinks(mesh, case, own, device=device, **options)
        return results, torch.zeros(()) if dsinks is None else dsinks

    answers = run_ranks(case.ranks, on_rank, timeout=timeout)
    return assemble(case, [results for results, _ in answers]), [dsinks for _, dsinks in answers]


def dense(case: Case) -> tuple[Results, Tensor]:
    """In float64."""
    inputs = [x.double() for x in inputs_of(case.shape, case.dtype, case.seed)]
    leaves = [x.clone().requires_grad_() for x in (*inputs[:3], sinks_of(case).double())]
    q, k, v, sinks = leaves
    out, lse = reference.attention(q, k, v, sinks=sinks, **score_options(case), **case.rule)
    dq, dk, dv, dsinks = torch.autograd.grad(out, leaves, inputs[3])
    return Results(out.detach(), lse.detach(), dq, dk, dv), dsinks
