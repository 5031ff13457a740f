"""Kernels made of a foreign attention: how a block is cut, and the whole against dense attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product

import pytest
import torch

from cases import Inputs, Results, Shape, dense, make_inputs
from key_blocks import cut, run_over
from meshattn_kernels import UNBOUNDED, ArrayIntervals, BandIntervals, get_kernel
from meshattn_kernels.contract import new_accumulator
from meshattn_kernels.plain_blocks import PlainBlocks, pieces_of
from meshattn_kernels.rules import RULES, Platform, Request
from tolerance import assert_close

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
SHAPES = [
    Shape(B=2, S=37, H=6, H_kv=3, D=16),
    Shape(B=1, S=150, H=4, H_kv=1, D=64, S_k=203),
    Shape(B=2, S=203, H=2, H_kv=2, D=128, S_k=150),
]


def small_bands() -> Iterator[BandIntervals]:
    for lo, n_q, n_k in product((-UNBOUNDED, *range(-6, 7)), range(6), range(6)):
        yield BandIntervals(lo, UNBOUNDED, n_q, n_k)


def test_pieces_cover_a_block_once() -> None:
    for band in small_bands():
        seen = torch.zeros(band.n_q, band.n_k, dtype=torch.int32)
        for piece in pieces_of(band, "sdpa"):
            part = seen[piece.rows, piece.keys]
            assert part.numel() > 0
            assert not piece.causal or part.shape[0] == part.shape[1] > 1
            part += torch.ones_like(part).tril() if piece.causal else 1
        start, end = band.bounds(band.n_q)
        key = torch.arange(band.n_k)
        assert torch.equal(seen.bool(), (key >= start[:, None]) & (key < end[:, None])), band
        assert bool((seen <= 1).all()), band


def test_striped_and_full_blocks_are_one_piece() -> None:
    """The causal blocks of a striped layout have lo 0 or 1."""
    for lo, rows in ((0, slice(0, 9)), (1, slice(1, 9))):
        (piece,) = pieces_of(BandIntervals(lo, UNBOUNDED, 9, 9 - lo), "sdpa")
        assert (piece.rows, piece.causal) == (rows, True)
    (piece,) = pieces_of(BandIntervals(-UNBOUNDED, UNBOUNDED, 9, 4), "sdpa")
    assert not piece.causal


def test_other_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="kernel 'fa4' takes full and causal blocks, but the last row"):
        pieces_of(BandIntervals(0, 3, 9, 9), "fa4")
    arrays = ArrayIntervals(*BandIntervals(0, UNBOUNDED, 9, 9).bounds(9), 9, 9)
    with pytest.raises(ValueError, match="kernel 'sdpa' takes full and causal blocks, but here every row"):
        pieces_of(arrays, "sdpa")


def run(kernel: PlainBlocks, inputs: Inputs, cuts: list[int], lo: int, n_q: int, scale: float) -> Results:
    """All results of causal attention (row s sees the keys up to s - lo), a block for every run of keys.

    The rows from n_q on are NaN, as new memory is in the tests.
    """
    q, k, v, do = (x.clone() for x in inputs)
    q[:, n_q:] = do[:, n_q:] = math.nan
    blocks = cut(BandIntervals(lo, UNBOUNDED, n_q, k.shape[1]), cuts)
    return run_over(kernel, Inputs(q, k, v, do), blocks, scale, partial(new_accumulator, kernel))


def cuts_of(shape: Shape) -> list[list[int]]:
    keys = shape.seq_len_k
    return [[0, keys], sorted({0, keys // 3, keys // 2 + 1, keys})]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["sdpa", "cudnn", "fa4"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle(device: str, name: str, dtype: torch.dtype, causal: bool, shape: Shape) -> None:
    """Causal is aligned at the bottom right; with more queries than keys the first rows see nothing."""
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    refused = RULES[name](Request(Platform.of(where), dtype, shape.D, shape.D))
    if refused is not None:
        pytest.skip(refused)
    kernel = get_kernel(name)
    assert isinstance(kernel, PlainBlocks)
    inputs = make_inputs(shape, dtype)
    oracle, eager = (dense(inputs, kind, causal=causal) for kind in (torch.float64, dtype))
    lo = shape.S - shape.seq_len_k if causal else -UNBOUNDED
    for cuts in cuts_of(shape):
        actual = run(kernel, Inputs(*(x.to(device) for x in inputs)), cuts, lo, shape.S, shape.D**-0.5)
        for field in Results._fields:
            reference = None if dtype == torch.float64 else getattr(eager, field)
            assert_close(field, getattr(actual, field), getattr(oracle, field), reference)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_rows_are_never_read(device: str) -> None:
    shape, dtype = SHAPES[0], torch.bfloat16 if device == "cuda" else torch.float64
    inputs = Inputs(*(x.to(device) for x in make_inputs(shape, dtype)))
    kernel = get_kernel("sdpa")
    assert isinstance(kernel, PlainBlocks)
    actual = run(kernel, inputs, [0, shape.S], 0, shape.S - 5, 0.3)
    assert all(bool(x.isfinite().all()) for x in actual if x is not actual.lse)
    assert not actual.out[:, -5:].any() and not actual.dq[:, -5:].any()
    assert bool((actual.lse[:, :, -5:] == -math.inf).all())


def test_gradients_of_rows_with_a_zero_gradient() -> None:
    shape = SHAPES[0]
    inputs = make_inputs(shape)
    inputs.do[:, ::2] = 0.0
    kernel = get_kernel("sdpa")
    assert isinstance(kernel, PlainBlocks)
    actual, oracle = run(kernel, inputs, [0, shape.S], 0, shape.S, 0.25), dense(inputs, causal=True)
    for field in Results._fields:
        assert_close(field, getattr(actual, field), getattr(oracle, field))
