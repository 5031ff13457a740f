"""The Triton passes over rows against the PyTorch operations that they stand for: any strides, any head size.

With TRITON_INTERPRET=1 they run in Triton's interpreter (see test_portable_interpreted.py), otherwise, marked
gpu, on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases import Shape
from meshattn_kernels.delta import row_delta
from meshattn_kernels.merge import merge_partial
from tolerance import assert_close

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret and not torch.cuda.is_available():
    pytest.skip("interpreted in a process of its own", allow_module_level=True)

from meshattn_kernels.hopper.join import join_parts_kernel  # noqa: E402
from meshattn_kernels.portable.launch import INTERPRETED  # noqa: E402
from meshattn_kernels.row_passes import launch_delta, launch_merge  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
View = Callable[[Tensor], Tensor]
SHAPES = [
    Shape(B=2, S=37, H=3, H_kv=3, D=64),
    Shape(B=1, S=130, H=2, H_kv=2, D=40),
    Shape(B=3, S=5, H=5, H_kv=5, D=1),
    Shape(B=1, S=33, H=1, H_kv=1, D=256),
    Shape(B=2, S=0, H=3, H_kv=3, D=64),
]


def plain(x: Tensor) -> Tensor:
    return x


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_other(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def inner_rows(x: Tensor) -> Tensor:
    """Rows of a longer chunk, whose other rows hold NaN."""
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 3, 4), value=math.nan)[:, 3 : 3 + x.shape[1]]


VIEWS = [plain, heads_first, every_other, inner_rows]


def normal(shape: Shape, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape.B, shape.S, shape.H, shape.D, generator=generator).to(DEVICE, dtype)


def partial(shape: Shape, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """A partial result, in which some rows have seen no key."""
    out = normal(shape, dtype, seed)
    lse = 5 * normal(shape, torch.float32, seed + 1)[..., 0].transpose(1, 2).contiguous()
    lse[:, :, seed % 3 :: 3] = -math.inf
    return out.masked_fill((lse == -math.inf).transpose(1, 2).unsqueeze(-1), 0.0), lse


def delta_of(do: Tensor, out: Tensor) -> Tensor:
    """By the kernel, in memory that held something else."""
    batch, rows, heads, _ = out.shape
    delta = torch.full((batch, heads, rows), math.nan, device=out.device)
    launch_delta(do, out, delta)
    return delta


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_delta_is_the_sum_of_products(shape: Shape, dtype: torch.dtype, view: View) -> None:
    do, out = normal(shape, dtype, 0), normal(shape, dtype, 1)
    exact = (do.double() * out.double()).sum(-1).transpose(1, 2)
    eager = (do.float() * out.float()).sum(-1).transpose(1, 2)
    for x, y in ((view(do), out), (do, view(out))):
        assert_close("delta", delta_of(x, y), exact, eager)


def test_delta_of_an_expanded_gradient() -> None:
    out = normal(SHAPES[0], torch.bfloat16, 1)
    ones = torch.ones((), dtype=out.dtype, device=DEVICE)
    assert torch.equal(
        delta_of(ones.expand(out.shape), out), delta_of(ones.expand(out.shape).contiguous(), out)
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_merge_is_that_of_pytorch(shape: Shape, dtype: torch.dtype, view: View) -> None:
    (out, lse), (other_out, other_lse) = partial(shape, torch.float32, 0), partial(shape, dtype, 4)
    exact_out, exact_lse = out.double(), lse.double()
    merge_partial(exact_out, exact_lse, other_out.double(), other_lse.double())
    eager_out, eager_lse = out.cpu().clone(), lse.cpu().clone()
    merge_partial(eager_out, eager_lse, other_out.cpu(), other_lse.cpu())
    out, lse = view(out.clone()), lse.clone()
    launch_merge(out, lse, view(other_out), other_lse)
    assert_close("out", out, exact_out, eager_out)
    assert_close("lse", lse, exact_lse, eager_lse)


def test_an_empty_side_changes_no_bit() -> None:
    (out, lse), (other_out, _) = partial(SHAPES[0], torch.float32, 0), partial(SHAPES[0], torch.float32, 4)
    merged_out, merged_lse = out.clone(), lse.clone()
    launch_merge(merged_out, merged_lse, torch.zeros_like(other_out), torch.full_like(lse, -math.inf))
    assert torch.equal(merged_out, out) and torch.equal(merged_lse, lse)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one thread")
@pytest.mark.parametrize("D", [1, 8, 16, 32, 64, 96, 128, 256])
def test_many_rows_merge_alike_on_every_run(D: int) -> None:
    """Threads that share a row must not read what one of them has already written."""
    shape = Shape(B=2, S=3001, H=4, H_kv=4, D=D)
    (out, lse), other = partial(shape, torch.float32, 0), partial(shape, torch.float32, 4)
    expected_out, expected_lse = out.double(), lse.double()
    merge_partial(expected_out, expected_lse, *(x.double() for x in other))
    runs = [(out.clone(), lse.clone()) for _ in range(10)]
    for run in runs:
        launch_merge(*run, *other)
    for merged_out, merged_lse in runs:
        assert torch.equal(merged_out, runs[0][0]) and torch.equal(merged_lse, runs[0][1])
    assert float((runs[0][0] - expected_out).abs().max()) < 1e-5
    finite = expected_lse.isfinite()
    assert torch.equal(runs[0][1].isfinite(), finite)
    assert float((runs[0][1] - expected_lse)[finite].abs().max()) < 1e-5


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_on_a_gpu_neither_makes_a_temporary() -> None:
    shape = Shape(B=1, S=4096, H=8, H_kv=8, D=128)
    do, out = normal(shape, torch.bfloat16, 0), normal(shape, torch.bfloat16, 1)
    acc, other = partial(shape, torch.float32, 2), partial(shape, torch.float32, 3)
    calls: list[tuple[Callable[[], object], int]] = [
        (lambda: row_delta(do, out), 4 * shape.B * shape.S * shape.H),
        (lambda: merge_partial(*acc, *other), 0),
    ]
    for call, expected in calls:
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        assert torch.cuda.max_memory_allocated() - before <= expected


@pytest.mark.parametrize("first", [True, False], ids=["first", "merge"])
def test_parts_of_rows_are_joined_by_weight(first: bool) -> None:
    """Three blocks of rows, the last one cut off by the end of the sequence, with rows that see no key."""
    shape, block = Shape(B=2, S=43, H=3, H_kv=3, D=40), 16
    joins = [(0, 2, 0, 3, 2), (1, 0, 2, 0, 3), (1, 1, 1, 5, 2)]
    generator = torch.Generator().manual_seed(3)
    out_parts = torch.randn((7, block, shape.D), generator=generator)
    lse_parts = torch.randn((7, block), generator=generator)
    lse_parts[3, 5:] = lse_parts[4, 9:] = -math.inf
    lse = torch.randn((shape.B, shape.H, shape.S), generator=generator)
    out, expected_lse = normal(shape, torch.float32, 4).cpu(), lse.clone()
    expected = out.clone()
    for batch, head, number, begin, count in joins:
        rows = slice(number * block, min((number + 1) * block, shape.S))
        size = rows.stop - rows.start
        weights, values = lse_parts[begin : begin + count, :size], out_parts[begin : begin + count, :size]
        if not first:
            weights = torch.cat((weights, lse[batch, head, rows][None]))
            values = torch.cat((values, out[batch, rows, head][None]))
        share = weights.softmax(0).nan_to_num(0.0)
        expected[batch, rows, head] = (share[..., None] * values).sum(0)
        expected_lse[batch, head, rows] = weights.logsumexp(0)
    table = torch.tensor([[*join, 0, 0, 0] for join in joins], dtype=torch.int32)
    tensors = [x.to(DEVICE) for x in (out_parts, lse_parts, table, out, lse)]
    join_parts_kernel[(len(joins) * block // 8,)](
        *tensors, shape.S, shape.S, shape.H, BLOCK=block, ROWS=8, HEAD_DIM_V=shape.D, DV_TILE=64, FIRST=first
    )
    torch.testing.assert_close(tensors[3].cpu(), expected)
    torch.testing.assert_close(tensors[4].cpu(), expected_lse)
