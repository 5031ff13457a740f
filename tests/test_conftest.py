"""The poison that the other tests rely on."""

from __future__ import annotations

import torch


def test_uninitialised_memory_of_library_code_is_nan() -> None:
    library: dict[str, object] = {"__name__": "meshattn.some.module", "torch": torch}
    for make in (
        "torch.empty(3)",
        "torch.empty_like(torch.ones(3))",
        "torch.ones(2).new_empty(3)",
        "torch.empty_strided((3,), (2,), dtype=torch.bfloat16)",
        "torch.empty(12, dtype=torch.uint8).view(torch.float32)",
        "torch.empty(12, dtype=torch.uint8).view(torch.bfloat16)",
    ):
        assert eval(make, library).isnan().all(), make


def test_memory_of_other_code_is_left_alone() -> None:
    buffer = torch.zeros(3)
    other: dict[str, object] = {"__name__": "numpy_like", "torch": torch, "buffer": buffer}
    assert (eval("torch.empty(3, out=buffer)", other) == 0).all()
