"""Runs of cases with sinks whose gradient is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import meshattn as ma
from cases import Results
from distributed import Case, assemble, build_mesh, inputs_of, local_inputs, sequences, sinks_of
from meshattn import reference
from meshattn.testing import run_ranks


def run(
    case: Case, sinks: Tensor | None, *, device: str = "cpu", timeout: float = 100.0, **options: Any
) -> tuple[Results, list[Tensor]]:
    """Global results, and the gradient of the sinks on every rank."""

    def on_rank(group: Any) -> tuple[Results, Tensor]:
        mesh = build_mesh(group, case, timeout=timeout)
        seq, kv_seq = sequences(mesh, case)
        *leaves, do = (x.to(device) for x in local_inputs(case, mesh.rank))
        leaves = [x.requires_grad_() for x in leaves]
        own = None if sinks is None else sinks.to(device, copy=True).requires_grad_()
        call = ma.ring_attention if case.ring else ma.mesh_attention
        out, lse = call(
            *leaves,
            seq,
            kv_seq=kv_seq,
            causal=case.causal,
            window_size=case.window_size,
            softmax_scale=case.softmax_scale,
            softcap=case.softcap,
            dropout_p=case.dropout_p,
            dropout_seed=case.dropout_seed,
            sinks=own,
            return_lse=True,
            **options,
        )
        wanted = leaves if own is None else [*leaves, own]
        dq, dk, dv, *rest = torch.autograd.grad(out, wanted, do)
        results = Results(*(x.detach().cpu() for x in (out, lse, dq, dk, dv)))
        return results, rest[0].cpu() if rest else torch.zeros(())

    answers = run_ranks(case.ranks, on_rank, timeout=timeout)
    return assemble(case, [results for results, _ in answers]), [dsinks for _, dsinks in answers]


def dense(case: Case) -> tuple[Results, Tensor]:
    """In float64."""
    inputs = [x.double() for x in inputs_of(case.shape, case.dtype, case.seed)]
    leaves = [x.clone().requires_grad_() for x in (*inputs[:3], sinks_of(case).double())]
    q, k, v, sinks = leaves
    names = ("softmax_scale", "softcap", "dropout_p", "dropout_seed")
    options = {name: getattr(case, name) for name in names}
    out, lse = reference.attention(q, k, v, sinks=sinks, **options, **case.rule)
    dq, dk, dv, dsinks = torch.autograd.grad(out, leaves, inputs[3])
    return Results(out.detach(), lse.detach(), dq, dk, dv), dsinks
