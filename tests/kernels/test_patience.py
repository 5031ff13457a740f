"""How long workers of the Hopper backward wait for each other (that they do: test_hopper.py, on a GPU)."""

from __future__ import annotations

import math

import pytest

failure = pytest.importorskip("meshattn_kernels.hopper.failure", exc_type=ImportError)


@pytest.mark.parametrize("patience", [0.5, 9.0, 10.0, 10.5, 1260.0, 1e12, math.inf])
def test_a_mailbox_says_how_often_to_look(patience: float) -> None:
    *written, looks = failure.mailbox(patience).tolist()
    assert written == [0, 0, 0, 0] and failure.describe(failure.mailbox(patience)) is None
    assert looks < 2**31 - 1, "there must be a number above it"
    if patience < 2000:
        assert 0 <= looks - patience * failure.READS_PER_SECOND < 1
    else:
        assert looks > 2000 * failure.READS_PER_SECOND


def test_the_same_patience_has_the_same_mailbox() -> None:
    """Graphs know its address."""
    assert failure.mailbox(20.0) is failure.mailbox(20.0)
    assert failure.mailbox(20.0) is not failure.mailbox(40.0)


@pytest.mark.parametrize("patience", [0.0, -1.0, math.nan])
def test_patience_is_positive(patience: float) -> None:
    kernel = pytest.importorskip("meshattn_kernels.hopper.kernel", exc_type=ImportError)
    with pytest.raises(ValueError, match=f"patience is {patience}; it must be a positive number of seconds"):
        kernel.HopperKernel(patience=patience)
