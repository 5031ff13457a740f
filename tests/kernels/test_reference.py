"""The reference kernel against the dense oracle: forward, every gradient, every way to be fed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cases import Inputs, Results, Shape, dense, make_inputs
from key_blocks import WITHOUT_PAIRS, Block, nan_accumulator, run_over
from meshattn_kernels import (
    UNBOUNDED,
    ArrayIntervals,
    BandIntervals,
    Intervals,
    get_kernel,
)
from meshattn_kernels.reference import ReferenceKernel
from tolerance import assert_close

NAN = math.nan
SHAPES = [
    Shape(B=2, S=11, H=6, H_kv=3, D=5, D_v=7),
    Shape(B=3, S=17, H=8, H_kv=2, D=4),
    Shape(B=1, S=13, H=5, H_kv=1, D=3, D_v=2),
    Shape(B=2, S=9, H=4, H_kv=4, D=6, S_k=21),
    Shape(B=1, S=23, H=6, H_kv=2, D=5, D_v=3, S_k=10),
    Shape(B=1, S=1, H=3, H_kv=1, D=4),
]
BLOCKS = [(1, 1), (2, 3), (5, 4), (512, 512)]
WINDOWS = [(-1, -1), (-1, 0), (3, 0), (0, 0), (4, 2)]


@dataclass(frozen=True)
class Run:
    """One query chunk against any number of key chunks; accumulator memory starts as NaN."""

    kernel: ReferenceKernel
    softmax_scale: float

    def accumulator(self, kind: str, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        return nan_accumulator(self.kernel, kind, q, k, v, (k if kind == "dkv" else q).shape[1])

    def __call__(self, inputs: Inputs, blocks: list[Block]) -> Results:
        return run_over(self.kernel, inputs, blocks, self.softmax_scale, self.accumulator)


def band(shape: Shape, window_size: tuple[int, int], t0: int = 0, t1: int | None = None) -> BandIntervals:
    """A window rule, aligned at the bottom right, for the keys t0 .. t1 - 1."""
    left, right = window_size
    t1 = shape.seq_len_k if t1 is None else t1
    shift = t0 - (shape.seq_len_k - shape.S)
    lo = -UNBOUNDED if right == -1 else shift - right
    hi = UNBOUNDED if left == -1 else shift + left
    return BandIntervals(lo, hi, shape.S, t1 - t0)


def as_arrays(intervals: Intervals, rows: int) -> ArrayIntervals:
    return ArrayIntervals(*intervals.bounds(rows), intervals.n_q, intervals.n_k)


def check(actual: Results, oracle: Results, eager: Results | None = None) -> None:
    for name in Results._fields:
        assert_close(
            name, getattr(actual, name), getattr(oracle, name), getattr(eager, name) if eager else None
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window_size", WINDOWS, ids=lambda w: f"window{w[0]},{w[1]}")
def test_equals_the_oracle(shape: Shape, window_size: tuple[int, int]) -> None:
    inputs = make_inputs(shape)
    oracle = dense(inputs, window_size=window_size, softmax_scale=0.4)
    for block_q, block_k in BLOCKS:
        run = Run(ReferenceKernel(block_q, block_k), 0.4)
        intervals = band(shape, window_size)
        check(run(inputs, [(slice(None), intervals)]), oracle)
        check(run(inputs, [(slice(None), as_arrays(intervals, shape.S))]), oracle)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lower_types_are_as_good_as_eager(shape: Shape, dtype: torch.dtype, causal: bool) -> None:
    inputs = make_inputs(shape, dtype)
    oracle, eager = dense(inputs, torch.float64, causal=causal), dense(inputs, causal=causal)
    run = Run(ReferenceKernel(4, 3), shape.D**-0.5)
    actual = run(inputs, [(slice(None), band(shape, (-1, 0 if causal else -1)))])
    assert actual.out.dtype == actual.dq.dtype == actual.dk.dtype == actual.dv.dtype == dtype
    assert actual.lse.dtype == torch.float32
    check(actual, oracle, eager)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window_size", [(-1, 0), (5, 3)], ids=["causal", "window"])
def test_growth_by_merging_many_blocks(dtype: torch.dtype, window_size: tuple[int, int]) -> None:
    """Eight key blocks, not in order, add at most half to the error of one; and 1e-12 in float64."""
    shape = Shape(B=1, S=61, H=4, H_kv=2, D=16, D_v=24)
    inputs = make_inputs(shape, dtype)
    oracle, eager = (
        dense(inputs, torch.float64, window_size=window_size),
        dense(inputs, window_size=window_size),
    )
    run = Run(ReferenceKernel(16, 16), 0.25)
    one = run(inputs, [(slice(None), band(shape, window_size))])
    cuts = list(pairwise([0, 1, 9, 17, 25, 33, 41, 49, 61]))
    order = [3, 0, 7, 5, 1, 6, 2, 4]
    grown = run(inputs, [(slice(*cuts[n]), band(shape, window_size, *cuts[n])) for n in order])
    # Gradients come back in the order of the blocks.
    back = torch.cat([torch.arange(*cuts[n]) for n in order]).argsort()
    grown = grown._replace(dk=grown.dk[:, back], dv=grown.dv[:, back])
    check(grown, oracle, eager)
    for name in Results._fields:
        exact = getattr(oracle, name)
        assert_close(name, getattr(grown, name), exact, getattr(one, name), factor=1.5)


def test_two_query_chunks_add_into_one_key_accumulator() -> None:
    shape = Shape(B=2, S=10, H=4, H_kv=2, D=3, D_v=5)
    q, k, v, do = inputs = make_inputs(shape)
    oracle = dense(inputs, causal=True, softmax_scale=0.6)
    kernel = ReferenceKernel(3, 4)
    run = Run(kernel, 0.6)
    delta = (oracle.out * do).sum(-1).transpose(1, 2)
    dkv = run.accumulator("dkv", q, k, v)
    for n, (s0, s1) in enumerate(((0, 4), (4, 10))):
        rows = slice(s0, s1)
        dq = run.accumulator("dq", q[:, rows], k, v)
        kernel.backward(
            q[:, rows], k, v, do[:, rows], oracle.lse[:, :, rows], delta[:, :, rows], dq, dkv,
            BandIntervals(-s0, UNBOUNDED, s1 - s0, shape.S),
            softmax_scale=0.6, first_dq=True, first_dkv=n == 0,
        )  # fmt: skip
        (dq_rows,) = kernel.finish("dq", dq, dtype=q.dtype, softmax_scale=0.6)
        assert_close("dq", dq_rows, oracle.dq[:, rows])
    dk, dv = kernel.finish("dkv", dkv, dtype=q.dtype, softmax_scale=0.6)
    assert_close("dk", dk, oracle.dk)
    assert_close("dv", dv, oracle.dv)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_padding_of_nan_reaches_nothing(dtype: torch.dtype, causal: bool) -> None:
    real, rows, keys = Shape(B=2, S=9, H=4, H_kv=2, D=3, D_v=5, S_k=7), 14, 12
    inputs = make_inputs(real, dtype)
    padded = Inputs(
        *(
            torch.cat([x, torch.full_like(x[:, :1], NAN).expand(-1, size - x.shape[1], -1, -1)], dim=1)
            for x, size in zip(inputs, (rows, keys, keys, rows), strict=True)
        )
    )
    oracle, eager = dense(inputs, torch.float64, causal=causal), dense(inputs, causal=causal)
    for block_q, block_k in BLOCKS:
        run = Run(ReferenceKernel(block_q, block_k), real.D**-0.5)
        intervals = band(real, (-1, 0 if causal else -1))
        for form in (intervals, as_arrays(intervals, rows)):
            actual = run(padded, [(slice(None), form)])
            check(
                Results(
                    actual.out[:, :9],
                    actual.lse[:, :, :9],
                    actual.dq[:, :9],
                    actual.dk[:, :7],
                    actual.dv[:, :7],
                ),
                oracle,
                eager,
            )
            assert (actual.lse[:, :, 9:] == -math.inf).all()
            for beyond in (actual.out[:, 9:], actual.dq[:, 9:], actual.dk[:, 7:], actual.dv[:, 7:]):
                assert (beyond == 0).all()


@pytest.mark.parametrize("intervals", WITHOUT_PAIRS.values(), ids=WITHOUT_PAIRS)
def test_a_block_without_pairs_writes_neutral_or_nothing(intervals: Intervals) -> None:
    shape = Shape(B=1, S=4, H=2, H_kv=1, D=3, S_k=5)
    inputs = Inputs(*(torch.full_like(x, NAN) for x in make_inputs(shape)))
    assert intervals.is_empty
    actual = Run(ReferenceKernel(), 1.0)(inputs, [(slice(None), intervals)])
    assert (actual.lse == -math.inf).all()
    for x in (actual.out, *actual[2:]):
        assert (x == 0).all()

    inputs = make_inputs(shape)
    everything = BandIntervals(-UNBOUNDED, UNBOUNDED, 4, 5)
    once = Run(ReferenceKernel(), 1.0)(inputs, [(slice(None), everything)])
    twice = Run(ReferenceKernel(), 1.0)(inputs, [(slice(None), everything), (slice(None), intervals)])
    assert torch.equal(once.out, twice.out) and torch.equal(once.lse, twice.lse)
    assert torch.equal(once.dq, twice.dq)


def test_any_strides_give_the_same_bits() -> None:
    shape = Shape(B=2, S=9, H=4, H_kv=2, D=3, D_v=5)
    inputs = make_inputs(shape)
    run = Run(ReferenceKernel(4, 4), 0.5)
    blocks: list[tuple[slice, Intervals]] = [(slice(None), band(shape, (-1, 0)))]
    expected = run(inputs, blocks)
    heads_first = Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))
    every_other = Inputs(*(x.repeat_interleave(2, dim=1)[:, ::2] for x in inputs))
    reversed_dims = Inputs(*(x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in inputs))
    for strided in (heads_first, every_other, reversed_dims):
        assert not strided.q.is_contiguous()
        for ours, same in zip(run(strided, blocks), expected, strict=True):
            assert torch.equal(ours, same)


def test_expanded_inputs() -> None:
    shape = Shape(B=3, S=7, H=4, H_kv=2, D=3)
    q, k, v, do = make_inputs(shape)
    inputs = Inputs(
        q[:1].expand_as(q), k[:, :, :1].expand_as(k), v[:, :1].expand_as(v), do[..., :1].expand_as(do)
    )
    actual = Run(ReferenceKernel(3, 2), 0.5)(inputs, [(slice(None), band(shape, (2, 2)))])
    check(actual, dense(inputs, window_size=(2, 2), softmax_scale=0.5))


def test_inputs_are_not_written_to() -> None:
    shape = Shape(B=1, S=6, H=1, H_kv=1, D=4)  # one head: rows-first and heads-first are the same memory
    inputs = make_inputs(shape)
    before = Inputs(*(x.clone() for x in inputs))
    Run(ReferenceKernel(6, 6), 0.5)(inputs, [(slice(None), band(shape, (-1, 0)))])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_autocast_changes_no_bit() -> None:
    shape = Shape(B=1, S=9, H=4, H_kv=2, D=8)
    inputs = make_inputs(shape, torch.bfloat16)
    run = Run(ReferenceKernel(4, 4), 0.5)
    expected = run(inputs, [(slice(None), band(shape, (-1, 0)))])
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(inputs, [(slice(None), band(shape, (-1, 0)))])
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_three_runs_give_the_same_bits() -> None:
    shape = Shape(B=2, S=33, H=4, H_kv=2, D=8)
    inputs = make_inputs(shape, torch.float32)
    runs = [Run(ReferenceKernel(8, 8), 0.5)(inputs, [(slice(None), band(shape, (-1, 0)))]) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], other, strict=True))


def test_large_scores_do_not_overflow() -> None:
    shape = Shape(B=1, S=8, H=2, H_kv=2, D=4)
    inputs = make_inputs(shape, torch.float32)
    inputs = inputs._replace(q=inputs.q * 1e3, k=inputs.k * 1e3)
    blocks: list[tuple[slice, Intervals]] = [
        (slice(0, 4), band(shape, (-1, 0), 0, 4)),
        (slice(4, 8), band(shape, (-1, 0), 4, 8)),
    ]
    actual = Run(ReferenceKernel(3, 3), 0.5)(inputs, blocks)
    check(
        actual,
        dense(inputs, torch.float64, causal=True, softmax_scale=0.5),
        dense(inputs, causal=True, softmax_scale=0.5),
    )


@pytest.mark.parametrize(
    ("window_size", "blocks", "masked"),
    [((-1, -1), 64, 0), ((-1, 0), 36, 8), ((8, 0), 15, 15), ((16, -1), 49, 6)],
    ids=["full", "causal", "causal-window", "window"],
)
def test_work_is_blocks_that_are_visible_and_masks_where_they_are_partly(
    window_size: tuple[int, int], blocks: int, masked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 x 8 blocks of 8 rows and keys: no product is larger than a block, and hidden blocks have none."""
    shape = Shape(B=1, S=64, H=2, H_kv=1, D=4)
    products: list[tuple[int, int]] = []
    masks: list[torch.Size] = []
    multiply, fill = Tensor.__matmul__, Tensor.masked_fill_

    def recorded_multiply(x: Tensor, y: Tensor) -> Tensor:
        products.append((x.shape[-2], y.shape[-1]))
        return multiply(x, y)

    def recorded_fill(x: Tensor, mask: Tensor, value: float) -> Tensor:
        masks.append(x.shape)
        return fill(x, mask, value)

    monkeypatch.setattr(Tensor, "__matmul__", recorded_multiply)
    monkeypatch.setattr(Tensor, "masked_fill_", recorded_fill)
    Run(ReferenceKernel(8, 8), 0.5)(make_inputs(shape), [(slice(None), band(shape, window_size))])
    assert all(rows <= 2 * 8 and keys <= 8 for rows, keys in products)
    assert len(products) == 3 * blocks  # scores; and again, with do v^T, in backward
    assert len(masks) == 2 * masked


def test_kernels_are_found_by_name() -> None:
    assert get_kernel("reference").name == "reference"
    assert get_kernel("reference").deterministic
    with pytest.raises(ValueError, match="kernel is 'flash'; choose one of reference"):
        get_kernel("flash")
    with pytest.raises(ValueError, match="block sizes are 0 x 4"):
        ReferenceKernel(0, 4)
