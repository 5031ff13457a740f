"""A kernel of a part of the heads, and results finished from two accumulators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import Shape, make_inputs
from meshattn_kernels import AttentionKernel, BandIntervals, get_kernel
from meshattn_kernels.contract import ACCUMULATOR_KINDS, accumulator_dtype, new_accumulator
from meshattn_kernels.intervals import UNBOUNDED
from meshattn_kernels.sharing import delay_some, heads_of, of_part, takes_parts

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
each_kernel = pytest.mark.parametrize(
    "name, shape",
    [
        ("reference", Shape(B=2, S=19, H=6, H_kv=3, D=8, D_v=4)),
        ("reference", Shape(B=1, S=11, H=5, H_kv=5, D=8)),
        pytest.param("hopper", Shape(B=2, S=700, H=6, H_kv=3, D=64), marks=on_hopper),
        pytest.param("hopper", Shape(B=1, S=1031, H=16, H_kv=16, D=128), marks=on_hopper),
        pytest.param("hopper", Shape(B=3, S=517, H=8, H_kv=2, D=128, D_v=64), marks=on_hopper),
    ],
    ids=str,
)
Accs = dict[str, dict[str, Tensor]]


def _run(name: str, shape: Shape) -> tuple[AttentionKernel, Callable[[list[AttentionKernel]], Accs]]:
    """The kernel, and what runs both passes with kernels one after the other on NaN-filled accumulators."""
    kernel, on_gpu = get_kernel(name, 0.0), name == "hopper"
    dtype = torch.bfloat16 if on_gpu else torch.float64
    q, k, v, do = (x.to("cuda" if on_gpu else "cpu") for x in make_inputs(shape, dtype))
    band = BandIntervals(0, UNBOUNDED, shape.S - 2, shape.S - 3)

    def new() -> Accs:
        return {kind: new_accumulator(kernel, kind, q, k, v) for kind in ACCUMULATOR_KINDS}

    whole = new()
    scale: dict[str, Any] = {"softmax_scale": 0.3}
    kernel.forward(q, k, v, whole["out"], band, **scale, first=True)
    lse = whole["out"]["lse"]

    def run(kernels: list[AttentionKernel]) -> Accs:
        accs = new()
        for part in kernels:
            part.forward(q, k, v, accs["out"], band, **scale, first=True)
            part.backward(
                q, k, v, do, lse, torch.zeros_like(lse), accs["dq"], accs["dkv"], band,
                **scale, first_dq=True, first_dkv=True,
            )  # fmt: skip
        return accs

    return kernel, run


def _heads_of(kind: str, name: str, tensor: Tensor, shape: Shape) -> Tensor:
    """The heads first; dk and dv [B, C, H_kv, D] or [B, H_kv, C, D], as the kernel has them."""
    if name == "out" or (kind == "dkv" and tensor.shape[1] == shape.S):
        return tensor.movedim(2, 0)
    return tensor.movedim(1, 0)


@each_kernel
def test_parts_are_the_block_and_leave_other_heads_alone(name: str, shape: Shape) -> None:
    kernel, run = _run(name, shape)
    assert takes_parts(kernel)
    whole, first = run([kernel]), run([of_part(kernel, 0, 2)])
    both = run([of_part(kernel, part, 2) for part in range(2)])
    mine = len(heads_of(shape.H_kv, (0, 2)))
    assert 0 < mine < shape.H_kv
    for kind, accs in whole.items():
        for x, expected in accs.items():
            bound = 1e-12 if name == "reference" else 1e-4
            torch.testing.assert_close(both[kind][x], expected, rtol=bound, atol=bound)
            heads = _heads_of(kind, x, first[kind][x], shape)
            cut = len(heads) * mine // shape.H_kv
            assert not heads[:cut].isnan().any() and heads[cut:].isnan().all(), f"{x}: other heads"


@each_kernel
def test_workers_told_to_begin_late_change_no_bit(name: str, shape: Shape) -> None:
    kernel, run = _run(name, shape)
    if not hasattr(kernel, "delay"):
        assert delay_some(kernel, torch.device("cuda", 0), 16, 20) is kernel
        return
    whole = run([kernel])
    for units in (1, 20, 64):
        late = run([delay_some(kernel, torch.device("cuda", 0), 16, units)])
        for kind, accs in whole.items():
            assert all(torch.equal(late[kind][x], expected) for x, expected in accs.items()), (kind, units)


@each_kernel
@pytest.mark.parametrize("kind", ["dq", "dkv"])
def test_finishing_two_accumulators_is_finishing_their_sum(name: str, shape: Shape, kind: Any) -> None:
    kernel, run = _run(name, shape)
    acc = run([kernel])[kind]
    dtype = torch.bfloat16 if name == "hopper" else torch.float64
    for other in (torch.bfloat16, accumulator_dtype(dtype)):
        plus: Mapping[str, Tensor] = {x: (y.flip(0) * 0.5).to(other).contiguous() for x, y in acc.items()}
        total = {x: y + plus[x].to(y.dtype) for x, y in acc.items()}
        mine = {x: y.clone() for x, y in acc.items()}
        got = kernel.finish(kind, mine, dtype=dtype, softmax_scale=0.3, plus=plus)
        want = kernel.finish(kind, total, dtype=dtype, softmax_scale=0.3)
        assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
