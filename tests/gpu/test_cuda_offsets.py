"""Tensors with elements beyond 2^31: rows, heads and batches far apart, and accumulators as large."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshattn_kernels import UNBOUNDED, AttentionKernel, BandIntervals, Intervals, get_kernel
from meshattn_kernels.contract import new_accumulator
from meshattn_kernels.delta import row_delta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
FAR = 2**31 + 2**20
KERNELS = ["triton", "triton-dash", "hopper"]


def chosen(name: str, gigabytes: int) -> AttentionKernel:
    if name == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * 10**9:
        pytest.skip(f"needs {gigabytes} GB of free memory")
    return get_kernel(name)


def results(
    kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, do: Tensor, intervals: Intervals
) -> list[Tensor]:
    """Finished out, dq, dk and dv, and lse."""
    acc = new_accumulator(kernel, "out", q, k, v)
    kernel.forward(q, k, v, acc, intervals, softmax_scale=0.1, first=True)
    lse = acc["lse"]
    (out,) = kernel.finish("out", acc, dtype=q.dtype, softmax_scale=0.1)
    del acc
    delta = row_delta(do, out)
    dq, dkv = (new_accumulator(kernel, kind, q, k, v) for kind in ("dq", "dkv"))
    kernel.backward(
        q, k, v, do, lse, delta, dq, dkv, intervals, softmax_scale=0.1, first_dq=True, first_dkv=True
    )
    (dq_out,) = kernel.finish("dq", dq, dtype=q.dtype, softmax_scale=0.1)
    return [out, dq_out, *kernel.finish("dkv", dkv, dtype=q.dtype, softmax_scale=0.1), lse]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batches", "rows", "heads"])
def test_elements_far_apart(name: str, dim: int) -> None:
    """The same bits as for dense copies. One allocation holds all four inputs."""
    kernel = chosen(name, 8)
    shape = [2, 520, 2, 64]
    torch.manual_seed(0)
    near = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    stride = -(-FAR // (shape[dim] - 1) // 64) * 64
    memory = torch.empty(stride * shape[dim], device="cuda", dtype=torch.bfloat16)
    size = near[0].numel() // shape[dim]
    assert 4 * size <= stride and (shape[dim] - 1) * stride > 2**31
    order = [dim, *(other for other in range(4) if other != dim)]
    far = []
    for number, x in enumerate(near):
        moved = x.permute(order)
        inner = moved[0].contiguous().stride()
        view = memory[number * size :].as_strided(moved.shape, (stride, *inner))
        view.copy_(moved)
        far.append(view.permute([order.index(n) for n in range(4)]))
        assert torch.equal(far[-1], x)
    intervals = BandIntervals(0, UNBOUNDED, 520, 520)
    for ours, same in zip(results(kernel, *far, intervals), results(kernel, *near, intervals), strict=True):
        assert torch.equal(ours, same)


@pytest.mark.parametrize("name", KERNELS)
def test_accumulators_beyond_32_bits(name: str) -> None:
    """Only the last rows see keys: their results are those of a small call, and all others are 0."""
    kernel = chosen(name, 50)
    rows, heads, head_dim, last = 2**17 + 128, 128, 128, 128
    assert rows * heads * head_dim > 2**31
    q = torch.zeros(1, rows, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    do = torch.ones_like(q)
    k, v = torch.randn(2, 1, 128, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    for x in (q, do):
        x[:, -last:] = torch.randn(1, last, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    large = results(kernel, q, k, v, do, BandIntervals(rows - last, UNBOUNDED, rows, 128))
    q, do = q[:, -last:].clone(), do[:, -last:].clone()
    small = results(kernel, q, k, v, do, BandIntervals(0, UNBOUNDED, last, 128))
    for number, (ours, same) in enumerate(zip(large, small, strict=True)):
        if number in (0, 1):
            assert torch.equal(ours[:, -last:], same)
            assert not ours[:, : rows - last].any()
        elif number == 4:
            assert torch.equal(ours[..., -last:], same)
        else:  # a kernel may sum in another order for another number of rows
            torch.testing.assert_close(ours.float(), same.float(), rtol=2e-2, atol=2e-2)
