"""Several tensors in one flat buffer."""

from __future__ import annotations

import pytest
import torch

from meshattn.packing import Field, Packing

CPU = torch.device("cpu")
PACKING = Packing(
    (
        Field("q", (2, 3, 8), torch.bfloat16),
        Field("lse", (2, 3), torch.float32),
        Field("none", (0, 4), torch.float64),
    )
)


def test_bytes_are_those_of_the_tensors() -> None:
    assert PACKING.nbytes == 2 * 3 * 8 * 2 + 2 * 3 * 4
    assert [field.nbytes for field in PACKING.fields] == [96, 24, 0]


def test_views_share_the_buffer_and_cover_it_once() -> None:
    buffer = torch.zeros(PACKING.nbytes, dtype=torch.uint8)
    views = PACKING.views(buffer)
    assert {name: (tuple(x.shape), x.dtype) for name, x in views.items()} == {
        field.name: (field.shape, field.dtype) for field in PACKING.fields
    }
    for view in views.values():
        view.view(torch.uint8).add_(1)
    assert buffer.tolist() == [1] * PACKING.nbytes, "every byte in exactly one view"


def test_a_new_buffer_has_the_type_of_its_fields() -> None:
    packed = Packing((Field("dk", (2, 3), torch.float64), Field("dv", (2, 5), torch.float64))).new(CPU)
    assert packed.flat.dtype == torch.float64 and packed.flat.nbytes == 2 * 8 * 8
    for name, view in packed.views.items():
        view.fill_(1 if name == "dk" else 2)
    assert packed.flat.tolist() == [1] * 6 + [2] * 10


def test_fields_that_would_not_be_aligned_are_refused() -> None:
    crooked = Packing((Field("a", (3,), torch.bfloat16), Field("b", (1,), torch.float32)))
    with pytest.raises(AssertionError, match="b would not be aligned"):
        crooked.views(torch.zeros(crooked.nbytes, dtype=torch.uint8))
