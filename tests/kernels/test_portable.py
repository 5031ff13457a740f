"""The portable kernels against dense attention: every mask form, merging, grouped heads, padding, bits.

With TRITON_INTERPRET=1 they run in Triton's interpreter (see test_portable_interpreted.py), with small tiles;
otherwise, marked gpu, on the GPU with the tiles of its generation.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from cases import Inputs, Shape, make_inputs
from key_blocks import WITHOUT_PAIRS, cut
from meshattn_kernels import UNBOUNDED, ArrayIntervals, BandIntervals, Intervals
from tolerance import assert_close

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret and not torch.cuda.is_available():
    pytest.skip("interpreted in a process of its own", allow_module_level=True)

from meshattn_kernels.portable.kernel import TritonDashKernel, TritonKernel  # noqa: E402
from meshattn_kernels.portable.launch import INTERPRETED  # noqa: E402
from portable_runs import (  # noqa: E402
    DEVICE,
    KERNELS,
    LARGE,
    NAN,
    SMALL,
    Block,
    Kernel,
    Run,
    as_arrays,
    by_name,
    causal,
    check,
    dense,
    full,
    random_arrays,
    visible_pairs,
    window,
)

pytestmark = [] if INTERPRETED else [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.parametrize(
    "shape, dtype, rule",
    SMALL if INTERPRETED else SMALL + LARGE,
    ids=lambda x: x.__name__ if callable(x) else str(x),
)
def test_equals_dense_attention(kernel: Kernel, shape: Shape, dtype: torch.dtype, rule) -> None:
    inputs = make_inputs(shape, dtype)
    intervals = rule(shape)
    band = check(kernel, inputs, [(slice(None), intervals)])
    assert band.lse.dtype == torch.float32 and all(x.dtype == dtype for x in (band.out, *band[2:]))
    if not INTERPRETED:  # there it takes too long; the tests of padding compare the two forms
        arrays = Run(kernel, 0.3)(inputs, [(slice(None), as_arrays(intervals, shape.S))])
        for ours, same in zip(arrays, band, strict=True):
            assert torch.equal(ours, same)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_random_intervals_with_empty_rows_merge_from_several_blocks(kernel: Kernel) -> None:
    rows, cuts = (45, [0, 7, 7, 30]) if INTERPRETED else (801, [0, 129, 129, 500, 777])
    shape = Shape(B=1, S=rows, H=2, H_kv=1, D=16, D_v=24, S_k=cuts[-1])
    blocks: list[Block] = [
        (slice(t0, t1), random_arrays(rows, t1 - t0, seed=t1)) for t0, t1 in pairwise(cuts)
    ]
    check(kernel, make_inputs(shape, torch.bfloat16), [blocks[-1], *blocks[:-1]])


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_two_query_chunks_add_into_one_key_accumulator(kernel: Kernel) -> None:
    cut, rows, keys = (7, 33, 20) if INTERPRETED else (250, 411, 300)
    shape = Shape(B=1, S=rows, H=2, H_kv=1, D=16, S_k=keys)
    inputs = make_inputs(shape, torch.float32)
    visible = visible_pairs(rows, keys, [(slice(None), full(shape))])
    oracle, eager = (dense(inputs, visible, 0.3, dtype) for dtype in (torch.float64, torch.float32))
    q, k, v, do = inputs = Inputs(*(x.to(DEVICE) for x in inputs))
    lse, out = (x.float().to(DEVICE) for x in (oracle.lse, oracle.out))
    delta = (out * do).sum(-1).transpose(1, 2)
    run = Run(kernel, 0.3)
    dkv = run.accumulator("dkv", inputs, keys)
    for n, chunk in enumerate((slice(0, cut), slice(cut, rows))):
        intervals = BandIntervals(-UNBOUNDED, UNBOUNDED, q[:, chunk].shape[1], keys)
        dq = run.accumulator("dq", inputs, q[:, chunk].shape[1])
        kernel.backward(
            q[:, chunk], k, v, do[:, chunk], lse[:, :, chunk], delta[:, :, chunk], dq, dkv, intervals,
            softmax_scale=0.3, first_dq=True, first_dkv=n == 0,
        )  # fmt: skip
        (ours,) = kernel.finish("dq", dq, dtype=torch.float32, softmax_scale=0.3)
        assert_close("dq", ours, oracle.dq[:, chunk], eager.dq[:, chunk])
    dk, dv = kernel.finish("dkv", dkv, dtype=torch.float32, softmax_scale=0.3)
    assert_close("dk", dk, oracle.dk, eager.dk)
    assert_close("dv", dv, oracle.dv, eager.dv)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_a_result_written_at_once_has_the_bits_of_a_finished_accumulator(
    kernel: Kernel, kv_heads: int
) -> None:
    """Also where the parts of a group are summed. The interpreter cuts off what a GPU rounds, and so does not
    promise it."""
    kinds = {"out", "dq", "dkv"} if isinstance(kernel, TritonKernel) else {"out"}
    assert kernel.writes_finished == (set() if INTERPRETED else kinds)
    rows, keys = (37, 29) if INTERPRETED else (700, 333)
    shape = Shape(B=1, S=rows, H=3, H_kv=kv_heads, D=24, D_v=16, S_k=keys)
    inputs = Inputs(*(x.to(DEVICE) for x in make_inputs(shape, torch.bfloat16)))
    run, intervals = Run(kernel, 0.3), causal(shape)
    expected = run(inputs, [(slice(None), intervals)])
    accs = {
        kind: run.accumulator(kind, inputs, keys if kind == "dkv" else rows) for kind in ("out", "dq", "dkv")
    }
    for kind in kinds:
        accs[kind] = {name: x if name == "lse" else x.bfloat16() for name, x in accs[kind].items()}
    q, k, v, do = inputs
    kernel.forward(q, k, v, accs["out"], intervals, softmax_scale=0.3, first=True)
    exact = run.forward(inputs, [(slice(None), intervals)])
    delta = (exact["out"] * do).sum(-1).transpose(1, 2)
    kernel.backward(
        q, k, v, do, exact["lse"], delta, accs["dq"], accs["dkv"], intervals,
        softmax_scale=0.3, first_dq=True, first_dkv=True,
    )  # fmt: skip
    for kind in kinds:
        written = kernel.finish(kind, accs[kind], dtype=torch.bfloat16, softmax_scale=0.3)
        names = [name for name in accs[kind] if name != "lse"]
        for name, ours in zip(names, written, strict=True):
            assert ours is accs[kind][name]
            ulp = 2**-7 if INTERPRETED else 0.0
            torch.testing.assert_close(ours.cpu(), getattr(expected, name), rtol=ulp, atol=0.0)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.parametrize("form", ["band", "arrays"])
def test_a_block_without_pairs_clears_what_it_is_the_first_of(kernel: Kernel, form: str) -> None:
    """And leaves the other accumulators alone."""
    shape = Shape(B=1, S=19, H=2, H_kv=1, D=16)
    inputs = Inputs(*(x.to(DEVICE) for x in make_inputs(shape, torch.bfloat16)))
    nothing: Intervals = BandIntervals(19, UNBOUNDED, 19, 19)
    if form == "arrays":
        nothing = as_arrays(nothing, shape.S)
    q, k, v, do = inputs
    run = Run(kernel, 0.3)
    accs = {kind: run.accumulator(kind, inputs, shape.S) for kind in ("out", "dq", "dkv")}
    lse = torch.zeros(1, 2, shape.S, device=DEVICE)
    for firsts in ((True, True, False), (False, False, True)):
        for acc in accs.values():
            for tensor in acc.values():
                tensor.fill_(7.0)
        kernel.forward(q, k, v, accs["out"], nothing, softmax_scale=0.3, first=firsts[0])
        kernel.backward(
            q, k, v, do, lse, lse, accs["dq"], accs["dkv"], nothing,
            softmax_scale=0.3, first_dq=firsts[1], first_dkv=firsts[2],
        )  # fmt: skip
        for acc, first in zip(accs.values(), firsts, strict=True):
            for name, tensor in acc.items():
                cleared = -math.inf if name == "lse" else 0.0
                assert (tensor == (cleared if first else 7.0)).all(), (name, firsts)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.parametrize(
    "form, rule", [("band", causal), ("band", full), ("arrays", causal)], ids=["causal", "full", "arrays"]
)
def test_padding_of_nan_reaches_nothing(kernel: Kernel, form: str, rule) -> None:
    """Padding rows have NaN in every input, lse and delta; those within a tile and those beyond."""
    size, rows, keys = ((19, 13), 37, 37) if INTERPRETED else ((301, 205), 700, 500)
    real = Shape(B=1, S=size[0], H=2, H_kv=1, D=16, D_v=24, S_k=size[1])
    inputs = make_inputs(real, torch.bfloat16)
    padded_inputs = Inputs(
        *(
            torch.cat([x, torch.full_like(x[:, :1], NAN).expand(-1, n - x.shape[1], -1, -1)], dim=1)
            for x, n in zip(inputs, (rows, keys, keys, rows), strict=True)
        )
    )
    intervals: Intervals = rule(real)
    if form == "arrays":
        intervals = as_arrays(intervals, rows)
    expected = check(kernel, inputs, [(slice(None), rule(real))])
    actual = Run(kernel, 0.3)(padded_inputs, [(slice(None), intervals)])
    for name, dim, n in (("out", 1, 0), ("lse", 2, 0), ("dq", 1, 0), ("dk", 1, 1), ("dv", 1, 1)):
        ours, same = getattr(actual, name), getattr(expected, name)
        assert torch.equal(ours.narrow(dim, 0, size[n]), same), name
        beyond = ours.narrow(dim, size[n], ours.shape[dim] - size[n])
        assert (beyond == (-math.inf if name == "lse" else 0)).all(), name


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.parametrize("intervals", WITHOUT_PAIRS.values(), ids=WITHOUT_PAIRS)
def test_a_block_without_pairs_writes_neutral_or_nothing(kernel: Kernel, intervals: Intervals) -> None:
    shape = Shape(B=1, S=4, H=1, H_kv=1, D=16, S_k=5)
    inputs = make_inputs(shape, torch.float32)
    alone = Run(kernel, 1.0)(inputs, [(slice(None), intervals)])
    assert (alone.lse == -math.inf).all()
    assert all((x == 0).all() for x in (alone.out, *alone[2:]))
    once = Run(kernel, 1.0)(inputs, [(slice(None), full(shape))])
    twice = Run(kernel, 1.0)(inputs, [(slice(None), full(shape)), (slice(None), intervals)])
    for name in ("out", "lse", "dq"):
        assert torch.equal(getattr(once, name), getattr(twice, name)), name


def test_rows_without_keys_keep_their_bits_when_blocks_merge() -> None:
    """Half of the rows of every tile see nothing in the second block."""
    shape = Shape(B=1, S=32, H=4, H_kv=4, D=16)
    inputs = make_inputs(shape, torch.float32)
    end = torch.arange(32, dtype=torch.int32)
    start = torch.where(end % 2 == 0, end, torch.clamp(end - 2, min=0))
    start = torch.cummax(start, 0).values.int()
    second = ArrayIntervals(start, end, 32, 32)
    inputs = Inputs(*(x.to(DEVICE) for x in inputs))
    once = Run(TritonKernel(), 0.3).forward(inputs, [(slice(None), full(shape))])
    twice = Run(TritonKernel(), 0.3).forward(inputs, [(slice(None), full(shape)), (slice(None), second)])
    empty = start == end
    assert empty.any() and not empty.all()
    assert torch.equal(once["out"].cpu()[:, empty], twice["out"].cpu()[:, empty])
    assert torch.equal(once["lse"].cpu()[..., empty], twice["lse"].cpu()[..., empty])
    assert not torch.equal(once["lse"].cpu()[..., ~empty], twice["lse"].cpu()[..., ~empty])


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_any_strides_give_the_same_bits(kernel: Kernel) -> None:
    """Heads before rows, the last dim not innermost, and dims of stride 0."""
    shape = Shape(B=2, S=9, H=2, H_kv=1, D=16, D_v=24)
    q, k, v, do = make_inputs(shape, torch.bfloat16)
    strided = Inputs(
        q[:1].transpose(1, 2).contiguous().transpose(1, 2).expand_as(q),
        k.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        v[:, :1].expand_as(v),
        do[..., :1].expand_as(do),
    )
    blocks: list[Block] = [(slice(None), causal(shape))]
    expected = Run(kernel, 0.3)(Inputs(*(x.contiguous() for x in strided)), blocks)
    assert not any(x.is_contiguous() for x in strided)
    for ours, same in zip(Run(kernel, 0.3)(strided, blocks), expected, strict=True):
        assert torch.equal(ours, same)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_inputs_that_are_not_aligned_give_the_same_bits(kernel: Kernel) -> None:
    """Off by one element from a multiple of 16 bytes, with a stride of heads that is odd: compiled apart."""
    shape = Shape(B=1 if INTERPRETED else 2, S=21, H=2, H_kv=1, D=16, D_v=24)
    inputs = make_inputs(shape, torch.bfloat16)
    blocks: list[Block] = [(slice(None), causal(shape))]
    expected = Run(kernel, 0.3)(inputs, blocks)
    wide = (torch.nn.functional.pad(x, (1, 2)).to(DEVICE) for x in inputs)
    odd = Inputs(*(x[..., 1:-2] for x in wide))
    assert all(x.data_ptr() % 16 and x.stride(2) % 2 for x in odd)
    for ours, same in zip(Run(kernel, 0.3)(odd, blocks), expected, strict=True):
        assert torch.equal(ours, same)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(
    "where, value, block", [("q", NAN, 0), ("k", NAN, 0), ("k", NAN, 1), ("k", math.inf, 1)], ids=str
)
def test_what_is_no_number_shows_in_all_rows_that_see_it(where: str, value: float, block: int) -> None:
    """Out and lse are NaN, whichever of two blocks has the score, and other rows have the bits that they have
    without: a row of such a score must not look as if it saw no key."""
    shape = Shape(B=1, S=19, H=2, H_kv=1, D=16, D_v=24, S_k=23)
    inputs, cuts = make_inputs(shape, torch.float32), [0, 9, 23]
    inputs = inputs._replace(q=inputs.q.abs())  # so that the score with infinity is no -inf
    blocks = cut(causal(shape), cuts)
    row, key = 11, cuts[block] + 6
    q, k = inputs.q.clone(), inputs.k.clone()
    {"q": q[:, row], "k": k[:, key]}[where][..., 5] = value
    end = causal(shape).bounds(shape.S)[1]
    spoilt = (torch.arange(shape.S) == row) if where == "q" else end > key
    clean, actual = (
        Run(TritonKernel(), 0.3).forward(Inputs(*(x.to(DEVICE) for x in given)), blocks)
        for given in (inputs, inputs._replace(q=q, k=k))
    )
    for name, dim in (("out", 1), ("lse", 2)):
        got, same = (acc[name].cpu().movedim(dim, 0).flatten(1) for acc in (actual, clean))
        assert got[spoilt].isnan().all() and torch.equal(got[~spoilt], same[~spoilt]), name


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # where p of a hidden key is thrown away
def test_large_scores_do_not_overflow() -> None:
    shape = Shape(B=1, S=8, H=2, H_kv=2, D=16)
    inputs = make_inputs(shape, torch.float32)
    inputs = inputs._replace(q=inputs.q * 1e3, k=inputs.k * 1e3)
    blocks: list[Block] = [
        (slice(0, 4), BandIntervals(0, UNBOUNDED, 8, 4)),
        (slice(4, 8), BandIntervals(4, UNBOUNDED, 8, 4)),
    ]
    actual = Run(TritonKernel(), 0.5)(inputs, blocks)
    assert all(x.isfinite().all() for x in actual)


@pytest.mark.parametrize(
    "schedule", ["naive", "descending", "shortest_first", "longest_first", "halves", "split_shift"]
)
def test_every_linear_schedule_of_the_five_product_backward(schedule: str) -> None:
    """Also on one worker, and with the query heads of a group in registers."""
    shape = Shape(B=1, S=45, H=2, H_kv=1, D=16, S_k=40) if INTERPRETED else Shape(2, 900, 4, 2, 64, S_k=1100)
    kernel = TritonDashKernel(workers=1 if INTERPRETED else 33, schedule=schedule)
    check(kernel, make_inputs(shape, torch.bfloat16), [(slice(None), causal(shape))])


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_what_is_not_served_is_refused_by_name(kernel: Kernel) -> None:
    shape = Shape(B=1, S=4, H=2, H_kv=1, D=16)

    def forward(inputs: Inputs, scale: float = 1.0) -> None:
        q, k, v, _ = (x.to(DEVICE) for x in inputs)
        kernel.forward(q, k, v, {}, full(shape), softmax_scale=scale, first=True)

    with pytest.raises(ValueError, match=r"q is torch\.float64; kernel 'triton.* Choose kernel='reference'"):
        forward(make_inputs(shape))
    with pytest.raises(ValueError, match="v have head size 264"):
        forward(make_inputs(Shape(B=1, S=4, H=2, H_kv=1, D=16, D_v=264), torch.float16))
    with pytest.raises(ValueError, match=r"softmax_scale is -1\.0"):
        forward(make_inputs(shape, torch.float16), -1.0)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes any device")
def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    shape = Shape(B=1, S=4, H=2, H_kv=1, D=16)
    q, k, v, _ = make_inputs(shape, torch.float16)
    with pytest.raises(ValueError, match="q is on cpu; kernel 'triton' runs on CUDA devices"):
        TritonKernel().forward(q, k, v, {}, full(shape), softmax_scale=1.0, first=True)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one program after the other")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rule", [full, causal, window], ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("D", [64, 128])
def test_bits_repeat_for_every_number_of_workers(dtype: torch.dtype, rule, D: int) -> None:
    shape = Shape(B=2, S=1500, H=8, H_kv=2, D=D, S_k=1700)
    inputs = make_inputs(shape, dtype)
    blocks: list[Block] = [(slice(None), rule(shape))]
    for kernels in ([TritonKernel()] * 10, [TritonDashKernel(workers=w) for w in (None, 1, 33, 66, 116) * 4]):
        expected = Run(kernels[0], 0.1)(inputs, blocks)
        for kernel in kernels[1:]:
            for ours, same in zip(Run(kernel, 0.1)(inputs, blocks), expected, strict=True):
                assert torch.equal(ours, same), kernel
