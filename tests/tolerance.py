"""The one tolerance of the tests.

float64 agrees with a float64 oracle to 1e-12, relative to the oracle's greatest value or to 1, whichever is
greater. In a lower type the greatest error against the float64 oracle is at most twice that of eager
attention in the same type, plus an eps term: one rounding of the greatest value to that type, and what sums
of the order of 1 leave in the float32 accumulator where they cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT64_TOLERANCE = 1e-12


def error(actual: Tensor, oracle: Tensor) -> float:
    """Greatest absolute difference; infinite where one is NaN, or infinite and the other is not."""
    assert actual.shape == oracle.shape, f"shape {list(actual.shape)}, oracle {list(oracle.shape)}"
    actual, oracle = actual.detach().double().cpu(), oracle.detach().double().cpu()
    difference = torch.where(actual == oracle, 0.0, (actual - oracle).abs())
    return float(difference.nan_to_num(nan=torch.inf, posinf=torch.inf).max()) if difference.numel() else 0.0


def bound(oracle: Tensor, dtype: torch.dtype, eager: Tensor | None = None, *, factor: float = 2.0) -> float:
    """Greatest error allowed to a result of type ``dtype``, given the oracle and eager attention's result."""
    finite = oracle.detach()[oracle.detach().isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    if dtype == torch.float64:
        return FLOAT64_TOLERANCE * max(scale, 1.0)
    assert eager is not None, f"a {dtype} result is judged by eager attention in the same type"
    eager_error = error(eager, oracle)
    assert eager_error < torch.inf, "eager attention failed, so that it cannot judge"
    return factor * eager_error + torch.finfo(dtype).eps * scale + 4 * torch.finfo(torch.float32).eps


def assert_close(
    name: str, actual: Tensor, oracle: Tensor, eager: Tensor | None = None, *, factor: float = 2.0
) -> None:
    """``oracle`` is float64; ``eager`` is the same quantity from eager attention in the type under test."""
    assert oracle.dtype == torch.float64, f"the oracle of {name} is {oracle.dtype}"
    found, allowed = error(actual, oracle), bound(oracle, actual.dtype, eager, factor=factor)
    assert found <= allowed, (
        f"{name}: error {found:.3e} > {allowed:.3e} ({actual.dtype}, {list(actual.shape)})"
    )
