"""Several tensors in one flat buffer."""

from __future__ import annotations

import pytest
import torch

from meshattn.packing import Field, Packing

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


def test_write_casts_and_takes_any_strides() -> None:
    q = torch.randn(3, 2, 8, dtype=torch.float64).transpose(0, 1)
    lse = torch.randn(2, 1).expand(2, 3)
    buffer = torch.full((PACKING.nbytes,), 255, dtype=torch.uint8)
    PACKING.write(buffer, {"q": q, "lse": lse, "none": torch.zeros(0, 4)})
    views = PACKING.views(buffer)
    assert torch.equal(views["q"], q.bfloat16()) and torch.equal(views["lse"], lse)


def test_fields_that_would_not_be_aligned_are_refused() -> None:
    crooked = Packing((Field("a", (3,), torch.bfloat16), Field("b", (1,), torch.float32)))
    with pytest.raises(AssertionError, match="b would not be aligned"):
        crooked.views(torch.zeros(crooked.nbytes, dtype=torch.uint8))
