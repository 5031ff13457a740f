"""The Hopper kernels against dense attention: shape classes, every kind of intervals, merging, bits."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from cases import Inputs, Results, Shape, make_inputs
from key_blocks import Block, run_over
from meshattn_kernels import UNBOUNDED, ArrayIntervals, BandIntervals, Intervals, accumulator_dtype
from meshattn_kernels.dash import SCHEDULES
from tolerance import assert_close

plans = pytest.importorskip("meshattn_kernels.hopper.plans", exc_type=ImportError)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
    pytest.mark.timeout(600),
]

NAN = math.nan
DEVICE = "cuda"
Rule = Callable[[Shape], Intervals]


def full(shape: Shape) -> Intervals:
    return BandIntervals(-UNBOUNDED, UNBOUNDED, shape.S, shape.seq_len_k)


def causal(shape: Shape) -> Intervals:
    return BandIntervals(shape.S - shape.seq_len_k, UNBOUNDED, shape.S, shape.seq_len_k)


def window(shape: Shape) -> Intervals:
    """Rows at both ends see nothing if there are many more queries than keys."""
    return BandIntervals(-37, 150, shape.S, shape.seq_len_k)


def as_arrays(rule: Rule) -> Rule:
    def arrays(shape: Shape) -> Intervals:
        intervals = rule(shape)
        return ArrayIntervals(*intervals.bounds(shape.S), intervals.n_q, intervals.n_k)

    return arrays


def random_arrays(shape: Shape, seed: int = 0) -> ArrayIntervals:
    """Non-decreasing bounds with runs of empty rows."""
    generator = torch.Generator().manual_seed(seed)
    keys = shape.seq_len_k
    start = torch.randint(0, keys + 1, (shape.S,), generator=generator).sort().values
    length = torch.randint(0, max(1, keys // 3) + 1, (shape.S,), generator=generator)
    length[torch.rand(shape.S, generator=generator) < 0.2] = 0
    end = torch.maximum((start + length).clamp(max=keys), start)
    # Both must not decrease; an empty row takes the value that keeps them so.
    end = torch.cummax(end, 0).values
    empty = torch.rand(shape.S, generator=generator) < 0.1
    start = torch.where(empty, end, start)
    start = torch.cummax(start, 0).values
    end = torch.maximum(end, start)
    return ArrayIntervals(start.int(), end.int(), shape.S, keys)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Dense attention with the mask ``visible`` [S, S_k]; the softmax is in the type of lse."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k).to(accumulator_dtype(q.dtype)) * scale
    none = ~visible.any(-1)
    scores = scores.masked_fill(~visible & ~none[:, None], -math.inf).masked_fill(none[:, None], 0.0)
    lse = scores.logsumexp(-1).masked_fill(none, -math.inf)
    p = scores.softmax(-1).masked_fill(none[:, None], 0.0).to(q.dtype)
    return torch.einsum("bhst,bthd->bshd", p, v), lse


def dense(inputs: Inputs, visible: Tensor, scale: float, dtype: torch.dtype) -> Results:
    q, k, v, do = (x.detach().to(dtype) for x in inputs)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = attention(q, k, v, visible.to(q.device), scale)
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), do))


def pairs(intervals: Intervals, shape: Shape) -> Tensor:
    start, end = intervals.bounds(shape.S)
    key = torch.arange(shape.seq_len_k)
    return (key >= start[:, None]) & (key < end[:, None])


@dataclass(frozen=True)
class Run:
    """A kernel with the accumulators of one query chunk and any number of key chunks; memory starts as
    NaN."""

    kernel: object
    scale: float
    at_once: tuple[str, ...] = ()
    """Kinds of accumulators that are the results themselves, in the type of the inputs."""

    def accumulator(self, kind: str, q: Tensor, k: Tensor, v: Tensor, rows: int) -> dict[str, Tensor]:
        sizes = self.kernel.accumulator_shapes(  # type: ignore[attr-defined]
            kind, batch=q.shape[0], rows=rows, heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3],
            head_dim_v=v.shape[3],
        )  # fmt: skip
        dtypes = {
            name: q.dtype if kind in self.at_once and name != "lse" else torch.float32 for name in sizes
        }
        return {n: torch.full(sizes[n], NAN, dtype=dtypes[n], device=q.device) for n in sizes}

    def new(self, kind: str, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        return self.accumulator(kind, q, k, v, (k if kind == "dkv" else q).shape[1])

    def __call__(self, inputs: Inputs, blocks: list[Block]) -> Results:
        return run_over(self.kernel, inputs, blocks, self.scale, self.new)


def hopper(**options: object) -> object:
    from meshattn_kernels.hopper.kernel import HopperKernel

    return HopperKernel(**options)  # type: ignore[arg-type]


def on_gpu(shape: Shape, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Inputs:
    return Inputs(*(x.to(DEVICE) for x in make_inputs(shape, dtype, seed)))


def check(
    shape: Shape, intervals: Intervals, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **options: object
) -> None:
    inputs, scale = on_gpu(shape, dtype, seed), shape.D**-0.5
    visible = pairs(intervals, shape)
    oracle, eager = dense(inputs, visible, scale, torch.float64), dense(inputs, visible, scale, dtype)
    actual = Run(hopper(**options), scale)(inputs, [(slice(None), intervals)])
    if int(visible.sum(-1).max()) <= 1:
        # p is 1 or 0, and dq and dk are 0 exactly: what is left is the rounding of do * (v - out).
        for name in ("dq", "dk"):
            assert getattr(actual, name).abs().max() < 1e-5
            eager = eager._replace(**{name: getattr(actual, name)})
    for name in Results._fields:
        assert_close(name, getattr(actual, name), getattr(oracle, name), getattr(eager, name))


CLASSES = [
    Shape(B=1, S=256, H=2, H_kv=2, D=128),
    Shape(B=1, S=256, H=2, H_kv=2, D=64),
    Shape(B=2, S=333, H=6, H_kv=2, D=128),
    Shape(B=2, S=333, H=6, H_kv=2, D=64),
    Shape(B=1, S=700, H=8, H_kv=1, D=128),
    Shape(B=1, S=700, H=8, H_kv=1, D=64),
    Shape(B=2, S=129, H=4, H_kv=4, D=128, S_k=517),
    Shape(B=2, S=517, H=4, H_kv=2, D=64, S_k=129),
    Shape(B=1, S=1531, H=4, H_kv=2, D=128),
]
RULES = {
    "full": full,
    "causal": causal,
    "window": window,
    "arrays": as_arrays(window),
    "random": random_arrays,
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("shape", CLASSES, ids=str)
def test_equals_dense_attention(shape: Shape, rule: Rule) -> None:
    check(shape, rule(shape))


@pytest.mark.parametrize("head_dim", [16, 32, 48, 80, 96, 112])
def test_other_head_sizes(head_dim: int) -> None:
    shape = Shape(B=1, S=301, H=2, H_kv=1, D=head_dim)
    check(shape, causal(shape))


@pytest.mark.parametrize("sizes", [(64, 128), (128, 64), (96, 32)], ids=lambda s: f"D{s[0]}-D_v{s[1]}")
def test_values_of_another_size(sizes: tuple[int, int]) -> None:
    shape = Shape(B=1, S=301, H=2, H_kv=1, D=sizes[0], D_v=sizes[1])
    check(shape, causal(shape))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_float16(head_dim: int) -> None:
    shape = Shape(B=1, S=400, H=2, H_kv=1, D=head_dim)
    check(shape, causal(shape), torch.float16)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_short_lengths(head_dim: int) -> None:
    for length in (1, 2, 3, 17, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 255, 257, 300):
        shape = Shape(B=1, S=length, H=2, H_kv=1, D=head_dim)
        check(shape, causal(shape), seed=length)
        other = Shape(B=1, S=length, H=2, H_kv=1, D=head_dim, S_k=301 - length)
        check(other, full(other), seed=length)
        check(other, random_arrays(other, seed=length), seed=length)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_odd_large(head_dim: int) -> None:
    shape = Shape(B=1, S=4099, H=2, H_kv=1, D=head_dim)
    check(shape, causal(shape))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1)], ids=lambda h: f"H{h[0]}-H_kv{h[1]}")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_merging_blocks(head_dim: int, heads: tuple[int, int]) -> None:
    shape = Shape(B=2, S=450, H=heads[0], H_kv=heads[1], D=head_dim)
    inputs, scale = on_gpu(shape), 0.11
    visible = pairs(causal(shape), shape)
    oracle, eager = (dense(inputs, visible, scale, dtype) for dtype in (torch.float64, torch.bfloat16))
    cuts = [(200, 329), (0, 200), (329, 450)]
    blocks: list[Block] = [(slice(a, b), BandIntervals(a, UNBOUNDED, 450, b - a)) for a, b in cuts]
    blocks[1] = (blocks[1][0], as_arrays(lambda _: blocks[1][1])(shape))
    grown = Run(hopper(), scale)(inputs, blocks)
    for workers in (1, 7):  # which have many tasks each
        again = Run(hopper(workers=workers), scale)(inputs, blocks)
        assert all(torch.equal(x, y) for x, y in zip(again, grown, strict=True)), f"workers {workers}"
    back = torch.cat([torch.arange(*cut) for cut in cuts]).argsort().to(DEVICE)
    grown = grown._replace(dk=grown.dk[:, back], dv=grown.dv[:, back])
    for name in Results._fields:
        assert_close(name, getattr(grown, name), getattr(oracle, name), getattr(eager, name))


@pytest.mark.parametrize("rule", [full, window, random_arrays], ids=["full", "window", "random"])
@pytest.mark.parametrize("head_dim", [48, 64, 128])
def test_merging_with_what_outweighs_it(head_dim: int, rule: Rule) -> None:
    """The second block counts for nearly nothing in half of the heads, the first one in the others. Rows that
    see nothing in one of them, and unused rows behind them, are as they were."""
    shape = Shape(B=1, S=901, H=4, H_kv=2, D=head_dim, S_k=640)
    q, k, v, do = on_gpu(shape)
    k[:, 384:, 0] *= 6
    k[:, :384, 1] *= 6
    inputs, scale = Inputs(q, k, v, do), 0.2
    visible = pairs(rule(shape), shape)
    oracle, eager = (dense(inputs, visible, scale, dtype) for dtype in (torch.float64, torch.bfloat16))
    blocks: list[Block] = []
    for cut in (slice(384, 640), slice(0, 384)):
        start, end = rule(shape).bounds(shape.S)
        size = cut.stop - cut.start
        clipped = ((bound - cut.start).clamp(0, size).int() for bound in (start, end))
        blocks.append((cut, ArrayIntervals(*clipped, shape.S, size)))
    merged = Run(hopper(), scale)(inputs, blocks)
    for name in ("out", "lse", "dq"):
        assert_close(name, getattr(merged, name), getattr(oracle, name), getattr(eager, name))
    few = Run(hopper(workers=3), scale)(inputs, blocks)
    assert all(torch.equal(x, y) for x, y in zip(few, merged, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1)], ids=lambda h: f"H{h[0]}-H_kv{h[1]}")
def test_adding_into_dk_and_dv(head_dim: int, heads: tuple[int, int]) -> None:
    shape = Shape(B=1, S=300, H=heads[0], H_kv=heads[1], D=head_dim)
    inputs, scale = on_gpu(shape), 0.1
    q, k, v, do = inputs
    visible = pairs(causal(shape), shape)
    oracle, eager = (dense(inputs, visible, scale, dtype) for dtype in (torch.float64, torch.bfloat16))
    run = Run(hopper(), scale)
    delta = (oracle.out * do).sum(-1).transpose(1, 2).float()
    dkv = run.accumulator("dkv", q, k, v, 300)
    for n, (s0, s1) in enumerate(((0, 130), (130, 300))):
        rows = slice(s0, s1)
        dq = run.accumulator("dq", q, k, v, s1 - s0)
        run.kernel.backward(
            q[:, rows], k, v, do[:, rows], oracle.lse[:, :, rows].float(), delta[:, :, rows], dq, dkv,
            BandIntervals(-s0, UNBOUNDED, s1 - s0, 300), softmax_scale=scale, first_dq=True, first_dkv=n == 0,
        )  # fmt: skip
        (got,) = run.kernel.finish("dq", dq, dtype=q.dtype, softmax_scale=scale)
        assert_close("dq", got, oracle.dq[:, rows], eager.dq[:, rows])
    dk, dv = run.kernel.finish("dkv", dkv, dtype=q.dtype, softmax_scale=scale)
    assert_close("dk", dk, oracle.dk, eager.dk)
    assert_close("dv", dv, oracle.dv, eager.dv)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("form", ["full", "causal", "arrays"])
def test_padding_of_nan_reaches_nothing(head_dim: int, form: str) -> None:
    real, rows, keys = Shape(B=2, S=201, H=4, H_kv=2, D=head_dim, S_k=170), 333, 300
    inputs = on_gpu(real)
    padded = Inputs(
        *(
            torch.cat([x, torch.full_like(x[:, :1], NAN).expand(-1, size - x.shape[1], -1, -1)], dim=1)
            for x, size in zip(inputs, (rows, keys, keys, rows), strict=True)
        )
    )
    intervals = {"full": full, "causal": causal, "arrays": causal}[form](real)
    if form == "arrays":
        intervals = ArrayIntervals(*intervals.bounds(rows), real.S, real.seq_len_k)
    visible, scale = pairs(RULES["causal" if form == "arrays" else form](real), real), real.D**-0.5
    oracle, eager = (dense(inputs, visible, scale, dtype) for dtype in (torch.float64, torch.bfloat16))
    actual = Run(hopper(), scale)(padded, [(slice(None), intervals)])
    real_rows = Results(
        actual.out[:, :201],
        actual.lse[:, :, :201],
        actual.dq[:, :201],
        actual.dk[:, :170],
        actual.dv[:, :170],
    )
    for name in Results._fields:
        assert_close(name, getattr(real_rows, name), getattr(oracle, name), getattr(eager, name))
    assert (actual.lse[:, :, 201:] == -math.inf).all()
    for beyond in (actual.out[:, 201:], actual.dq[:, 201:], actual.dk[:, 170:], actual.dv[:, 170:]):
        assert (beyond == 0).all()


@pytest.mark.parametrize("at", [150, 250])
@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_is_no_number_shows_in_all_rows_that_see_it(head_dim: int, where: str, at: int) -> None:
    """Whichever of two blocks has the score; other rows have the bits that they have without. A row of such a
    score must not look as if it saw no key."""
    shape = Shape(B=2, S=333, H=4, H_kv=2, D=head_dim)
    inputs = on_gpu(shape)
    blocks: list[Block] = [
        (slice(a, b), BandIntervals(a, UNBOUNDED, 333, b - a)) for a, b in ((0, 200), (200, 333))
    ]
    spoilt = inputs._replace(**{where: getattr(inputs, where).clone()})
    getattr(spoilt, where)[:, at, :, 5] = NAN
    row = torch.arange(333)
    rows = row == at if where == "q" else row >= at
    clean, actual = (Run(hopper(), 0.1)(given, blocks) for given in (inputs, spoilt))
    for name, dim in (("out", 1), ("lse", 2), ("dq", 1)):
        got, same = (getattr(results, name).cpu().movedim(dim, 0).flatten(1) for results in (actual, clean))
        assert got[rows].isnan().all(), name
        if (
            name != "dq"
        ):  # which gets 0 * NaN from keys of a tile that a row does not see, as it does elsewhere
            assert torch.equal(got[~rows], same[~rows]), name


def test_what_is_no_number_shows_in_pieces() -> None:
    shape = Shape(B=1, S=1930, H=13, H_kv=13, D=64, S_k=1408)
    inputs, visible = on_gpu(shape), full(shape)
    assert plans.forward_plan(visible, hopper()._call(*inputs[:3], True)).num_parts  # type: ignore[attr-defined]
    inputs.q[:, [7, 1900], :, 3] = NAN
    actual = Run(hopper(), 0.1)(inputs, [(slice(None), visible)])
    assert actual.out.isnan().any(-1).nonzero()[:, 1].unique().tolist() == [7, 1900]
    assert actual.lse.isnan().nonzero()[:, 2].unique().tolist() == [7, 1900]
    assert actual.out[:, [7, 1900]].isnan().all() and actual.lse[:, :, [7, 1900]].isnan().all()


def test_a_block_without_pairs_writes_neutral_or_nothing() -> None:
    shape = Shape(B=1, S=70, H=2, H_kv=1, D=64, S_k=50)
    everything = full(shape)
    for nothing in (BandIntervals(70, UNBOUNDED, 70, 50), BandIntervals(-UNBOUNDED, UNBOUNDED, 0, 50)):
        actual = Run(hopper(), 1.0)(
            Inputs(*(torch.full_like(x, NAN) for x in on_gpu(shape))), [(slice(None), nothing)]
        )
        assert (actual.lse == -math.inf).all()
        assert all((x == 0).all() for x in (actual.out, *actual[2:]))
        once = Run(hopper(), 1.0)(on_gpu(shape), [(slice(None), everything)])
        twice = Run(hopper(), 1.0)(on_gpu(shape), [(slice(None), everything), (slice(None), nothing)])
        assert all(torch.equal(x, y) for x, y in zip(once[:3], twice[:3], strict=True))


def test_any_strides_give_the_same_bits() -> None:
    shape = Shape(B=2, S=150, H=4, H_kv=2, D=64)
    inputs = on_gpu(shape)
    run = Run(hopper(), 0.1)
    blocks: list[Block] = [(slice(None), causal(shape))]
    expected = run(inputs, blocks)
    heads_first = Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))
    every_other = Inputs(*(x.repeat_interleave(2, dim=1)[:, ::2] for x in inputs))
    reversed_dims = Inputs(*(x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in inputs))
    odd_base = Inputs(*(torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in inputs))
    for strided in (heads_first, every_other, reversed_dims, odd_base):
        assert all(torch.equal(x, y) for x, y in zip(run(strided, blocks), expected, strict=True))


@pytest.mark.parametrize("heads", [(16, 16), (8, 2), (8, 1)], ids=lambda h: f"H{h[0]}-H_kv{h[1]}")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rule", [full, causal, random_arrays], ids=["full", "causal", "random"])
def test_same_bits_for_repeats_and_workers(head_dim: int, heads: tuple[int, int], rule: Rule) -> None:
    shape = Shape(B=1, S=2048, H=heads[0], H_kv=heads[1], D=head_dim)
    inputs = on_gpu(shape)
    blocks: list[Block] = [(slice(None), rule(shape))]
    expected = Run(hopper(), 0.1)(inputs, blocks)
    for workers in (None, None, None, 116, 66, 33, 1):
        again = Run(hopper(workers=workers), 0.1)(inputs, blocks)
        for name in Results._fields:
            assert torch.equal(getattr(again, name), getattr(expected, name)), f"{name}, workers {workers}"


@pytest.mark.parametrize("keys", [1408, 1330], ids=lambda keys: f"S_k{keys}")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tasks_in_pieces(head_dim: int, keys: int) -> None:
    """More tasks than the nominal workers, which see the same: the last ones are cut."""
    shape = Shape(B=1, S=1930, H=13, H_kv=13, D=head_dim, S_k=keys)
    inputs, scale, visible = on_gpu(shape), 0.1, full(shape)
    call = hopper()._call(*inputs[:3], True)  # type: ignore[attr-defined]
    assert plans.forward_plan(visible, call).num_parts and plans.backward_plan(visible, call).parts
    once: list[Block] = [(slice(None), visible)]
    oracle, eager = (dense(inputs, pairs(visible, shape), scale, x) for x in (torch.float64, torch.bfloat16))
    expected = Run(hopper(), scale)(inputs, once)
    for name in Results._fields:
        assert_close(name, getattr(expected, name), getattr(oracle, name), getattr(eager, name))
    for workers in (116, 66, 33, 1):
        again = Run(hopper(workers=workers), scale, at_once=("dkv",))(inputs, once)
        for name in Results._fields:
            assert torch.equal(getattr(again, name), getattr(expected, name)), f"{name}, workers {workers}"
    twice = Run(hopper(), scale)(inputs, once * 2)
    assert_close("out", twice.out, oracle.out, eager.out)
    assert_close("lse", twice.lse, oracle.lse + math.log(2), eager.lse + math.log(2))


def check_at_once(shape: Shape, rule: Rule, schedule: str | None = None) -> None:
    """Results that a kernel writes itself are those of its accumulators, bit for bit."""
    inputs = on_gpu(shape)
    blocks: list[Block] = [(slice(None), rule(shape))]
    kernel = hopper(schedule=schedule)
    assert {"out", "dkv"} <= kernel.writes_finished  # type: ignore[attr-defined]
    expected = Run(kernel, 0.1)(inputs, blocks)
    for kind, names in (("out", ("out", "lse")), ("dkv", Results._fields)):
        actual = Run(kernel, 0.1, at_once=(kind,))(inputs, blocks)
        for name in names:
            assert torch.equal(getattr(actual, name), getattr(expected, name)), f"{kind}: {name}"


@pytest.mark.parametrize("schedule", [None, "split_shift"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1)], ids=lambda h: f"H{h[0]}-H_kv{h[1]}")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rule", [full, causal, random_arrays], ids=["full", "causal", "random"])
def test_results_written_at_once_are_those_of_accumulators(
    head_dim: int, heads: tuple[int, int], rule: Rule, schedule: str | None
) -> None:
    shape = Shape(B=2, S=500, H=heads[0], H_kv=heads[1], D=head_dim, S_k=450)
    check_at_once(shape, rule, schedule)


@pytest.mark.parametrize("rule", [causal, random_arrays], ids=["causal", "random"])
@pytest.mark.parametrize(
    "sizes", [(48, 48), (80, 80), (112, 64), (64, 96)], ids=lambda s: f"D{s[0]}-D_v{s[1]}"
)
def test_results_of_head_sizes_that_do_not_fill_a_tile_are_written_at_once(
    sizes: tuple[int, int], rule: Rule
) -> None:
    check_at_once(Shape(B=2, S=500, H=6, H_kv=3, D=sizes[0], D_v=sizes[1], S_k=450), rule)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule(name: str) -> None:
    shape = Shape(B=1, S=1000, H=4, H_kv=2, D=128)
    check(shape, causal(shape) if name == "symmetric_shift" else full(shape), schedule=name)
    if name not in ("shift", "split_shift"):
        check(shape, causal(shape), schedule=name)
    whole_tiles = Shape(B=1, S=896, H=3, H_kv=3, D=128, S_k=640)
    for head_dim in (64, 128):
        if name != "symmetric_shift":
            check(replace(whole_tiles, D=head_dim), full(whole_tiles), schedule=name)


def test_the_control_without_order() -> None:
    shape = Shape(B=1, S=500, H=4, H_kv=2, D=128)
    assert not hopper(deterministic=False).deterministic  # type: ignore[attr-defined]
    check(shape, causal(shape), deterministic=False)


BROKEN = """
import torch
from meshattn_kernels import UNBOUNDED, BandIntervals
from meshattn_kernels.hopper import plans
from meshattn_kernels.hopper.kernel import HopperKernel

kernel, intervals = HopperKernel(**KEYWORDS), BandIntervals(-UNBOUNDED, UNBOUNDED, 128, 128)
x = torch.zeros(1, 128, 1, 64, dtype=torch.bfloat16, device="cuda")
rows = torch.zeros(1, 1, 128, device="cuda")
acc = [torch.empty(1, 128, 64, device="cuda").view(1, 128, 1, 64) for _ in range(3)]
call = kernel._call(x, x, x, False)
plans.backward_plan(intervals, call).table.steps.add_(7 << 16)  # a turn that never comes
kernel.backward(x, x, x, x, rows, rows, {"dq": acc[0]}, {"dk": acc[1], "dv": acc[2]}, intervals,
                softmax_scale=1.0, first_dq=True, first_dkv=True)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("patience", [10.0, 30.0], ids="patience-{}".format)
def test_a_turn_that_never_comes_ends_with_a_message(patience: float) -> None:
    program = BROKEN.replace("KEYWORDS", f"{{'patience': {patience}}}")
    begin = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
    assert ended.returncode != 0
    assert time.monotonic() - begin > patience / 2, "a read takes more than half of a microsecond"
    assert "waited in vain for turn 7 of an ordered sum, which stands at 0" in ended.stderr


def test_what_is_not_served() -> None:
    kernel = hopper()
    shapes = kernel.accumulator_shapes(
        "out", batch=1, rows=8, heads=1, kv_heads=1, head_dim=64, head_dim_v=64
    )  # type: ignore[attr-defined]
    acc = {name: torch.empty(size, device=DEVICE) for name, size in shapes.items()}
    intervals = BandIntervals(-UNBOUNDED, UNBOUNDED, 8, 8)

    def forward(
        head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, device: str = DEVICE
    ) -> None:
        x = torch.zeros(1, 8, 1, head_dim, dtype=dtype, device=device)
        kernel.forward(x, x, x, acc, intervals, softmax_scale=scale, first=True)  # type: ignore[attr-defined]

    with pytest.raises(ValueError, match=r"q and k have head size 256; .* Choose kernel='triton'"):
        forward(head_dim=256)
    with pytest.raises(ValueError, match="have head size 72"):
        forward(head_dim=72)
    with pytest.raises(ValueError, match=r"q is torch\.float32"):
        forward(dtype=torch.float32)
    with pytest.raises(ValueError, match="softmax_scale is 0"):
        forward(scale=0.0)
    with pytest.raises(ValueError, match="q is on cpu"):
        forward(device="cpu")
    with pytest.raises(ValueError, match="workers is 100000"):
        hopper(workers=100000).forward(  # type: ignore[attr-defined]
            *(torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16, device=DEVICE),) * 3, acc, intervals,
            softmax_scale=1.0, first=True,
        )  # fmt: skip
