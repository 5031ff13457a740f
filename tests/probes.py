"""Which rows of the results a change of the inputs reaches, by their bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import distributed
from cases import Inputs, Results
from distributed import assemble, run_cases
from mesh_cases import Case


def results_of(case: Case, inputs: Inputs, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Results:
    """Global results of a case on these inputs."""
    monkeypatch.setattr(distributed, "inputs_of", lambda *_: inputs)
    return assemble(case, run_cases([case], **options)[0])


def changed_rows(one: Tensor, other: Tensor, rows: int) -> set[int]:
    """Rows along dim ``rows`` of which any bit differs, but for the signs of zeros.

    The Hopper forward multiplies rows that see no key with 0, which may leave -0.0.
    """
    first, second = (x.movedim(rows, 0).flatten(1) + 0.0 for x in (one, other))
    differs = first.contiguous().view(torch.uint8) != second.contiguous().view(torch.uint8)
    return set(differs.any(1).nonzero().flatten().tolist())


def changed(one: Results, other: Results) -> dict[str, set[int]]:
    return {
        name: changed_rows(getattr(one, name), getattr(other, name), 2 if name == "lse" else 1)
        for name in Results._fields
    }


def with_token(inputs: Inputs, names: str, position: int) -> Inputs:
    """The inputs with another token at a position of some of the tensors."""
    spoilt: dict[str, Any] = inputs._asdict()
    for name in names.split():
        tensor = spoilt[name].clone()
        tensor[:, position] += 1.0
        spoilt[name] = tensor
    return Inputs(**spoilt)
