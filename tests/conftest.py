"""What every test gets: one thread, fixed seeds, and uninitialised memory that is poison."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def _poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrapper(*args: object, **kwargs: object) -> Tensor:
        tensor = make(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] in ("meshattn", "meshattn_kernels"):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype == torch.uint8:
                tensor.fill_(255)  # NaN, seen as any float type
        return tensor

    return wrapper


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Library code that reads memory it never wrote gets NaN, not the zeros that a fresh page often holds."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(Tensor, name, _poisoned(getattr(Tensor, name)))
