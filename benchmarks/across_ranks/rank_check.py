"""Whether what several ranks compute together is right, before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

import meshattn as ma
from across_ranks.rank_contenders import Case, Ours
from meshattn import reference

CHECKED_LENGTH = 331
CHECKED_ERROR = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
NAMES = ("out", "dq", "dk", "dv")


class Wrong(RuntimeError):
    """Results are not those of the oracle, on all ranks alike."""


def on_short(mesh: ma.AttentionMesh, case: Case, device: torch.device) -> tuple[Tensor, ...]:
    """out, dq, dk, dv [B, S, H, D] of the case on a short odd length. Collective."""
    return Ours("checked", mesh, replace(case, seq_len=CHECKED_LENGTH), device).whole()


def oracle(case: Case, device: torch.device) -> list[Tensor]:
    """The same by dense attention in float64."""
    inputs = replace(case, seq_len=CHECKED_LENGTH).inputs(device)
    exact = [x.double().requires_grad_() for x in inputs[:3]]
    out, _ = reference.attention(*exact, causal=case.causal)
    return [out.detach(), *torch.autograd.grad(out, exact, inputs[3].double())]


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    """Largest error of each, relative to the largest number of the exact one; NaN where there is one."""
    return {
        name: (mine.double() - true).abs().max().item() / true.abs().max().item()
        for name, mine, true in zip(NAMES, found, exact, strict=True)
    }


def check(mesh: ma.AttentionMesh, case: Case, device: torch.device, exact: Sequence[Tensor]) -> None:
    """`Wrong` unless out and all gradients agree with those of the oracle. Collective."""
    for name, error in errors(on_short(mesh, case, device), exact).items():
        if not error <= CHECKED_ERROR[case.dtype]:
            raise Wrong(f"{mesh.describe()}: {name} differs from the oracle by {error:.2e}")
