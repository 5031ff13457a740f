"""Everything that is timed, behind one small interface: inputs in, passes to run, results to check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attention_cases import (
    ADDING,
    BACKWARD,
    BACKWARD_TOTAL,
    FORWARD,
    FORWARD_TOTAL,
    MERGING,
    Case,
)
from meshattn_kernels import UNBOUNDED, AttentionKernel, BandIntervals, accumulator_dtype, get_kernel


class Inputs(NamedTuple):
    """q, do [B, S_q, H, D]; k, v [B, S_k, H_kv, D]; contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


class Results(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Contender(Protocol):
    """One kernel with the tensors of one case."""

    @property
    def passes(self) -> Mapping[str, Callable[[], object]]:
        """What can be run, by name of the pass; each can run again and again."""
        ...

    def results(self) -> Results:
        """Of a forward and a whole backward from scratch, [B, S, H, D]."""
        ...


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 1) -> Inputs:
    """Normal numbers."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(rows: int, heads: int) -> Tensor:
        size = (case.batch, rows, heads, case.head_dim)
        return torch.randn(size, generator=generator, device=device).to(dtype)

    queries, keys = (case.rows, case.heads), (case.num_keys, case.kv_heads)
    return Inputs(normal(*queries), normal(*keys), normal(*keys), normal(*queries))


def our_kernel(name: str) -> AttentionKernel:
    """A kernel by ``name``, ``name-unordered`` (sums in any order, the control) or ``name@schedule``."""
    base, _, schedule = name.partition("@")
    options: dict[str, Any] = {}
    if schedule:
        options["schedule"] = schedule
    if base.endswith("-unordered"):
        base, options["deterministic"] = base.removesuffix("-unordered"), False
    kernel: Any = get_kernel(base)
    return replace(kernel, **options) if options else kernel  # type: ignore[no-any-return]


@dataclass(eq=False)
class Ours:
    """A kernel of ``meshattn_kernels`` over one block, its accumulators poisoned at first."""

    kernel: AttentionKernel
    case: Case
    inputs: Inputs

    def __post_init__(self) -> None:
        case, q = self.case, self.inputs.q
        self.scale = case.head_dim**-0.5
        low = 0 if case.causal else -UNBOUNDED
        self.intervals = BandIntervals(low, UNBOUNDED, case.rows, case.num_keys)
        self.exact = accumulator_dtype(q.dtype)
        self.out, self.dq, self.dkv = (
            self._poisoned("out", case.rows),
            self._poisoned("dq", case.rows),
            self._poisoned("dkv", case.num_keys),
        )
        self.forward()
        self.lse = self.out["lse"].clone()
        self.finished = self.forward_total()
        self.delta = self.row_delta()

    def _poisoned(self, kind: Any, rows: int) -> dict[str, Tensor]:
        case = self.case
        shapes = self.kernel.accumulator_shapes(
            kind,
            batch=case.batch,
            rows=rows,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            head_dim_v=case.head_dim,
        )
        device = self.inputs.q.device
        return {
            name: torch.full(shape, math.nan, dtype=self.exact, device=device)
            for name, shape in shapes.items()
        }

    @property
    def passes(self) -> Mapping[str, Callable[[], object]]:
        return {
            FORWARD: self.forward,
            FORWARD_TOTAL: self.forward_total,
            MERGING: lambda: self.forward(first=False),
            BACKWARD: self.backward,
            ADDING: lambda: self.backward(first=False),
            BACKWARD_TOTAL: self.backward_total,
        }

    def forward(self, first: bool = True) -> None:
        q, k, v, _ = self.inputs
        self.kernel.forward(q, k, v, self.out, self.intervals, softmax_scale=self.scale, first=first)

    def forward_total(self) -> Tensor:
        self.forward()
        return self.finish_out()

    def finish_out(self) -> Tensor:
        dtype = self.inputs.q.dtype
        return self.kernel.finish("out", self.out, dtype=dtype, softmax_scale=self.scale)[0]

    def row_delta(self) -> Tensor:
        do = self.inputs.do
        return torch.einsum("bshd,bshd->bhs", do.to(self.exact), self.finished.to(self.exact))

    def backward(self, first: bool = True) -> None:
        self._backward(self.delta, first)

    def _backward(self, delta: Tensor, first: bool) -> None:
        self.kernel.backward(
            *self.inputs, self.lse, delta, self.dq, self.dkv, self.intervals,
            softmax_scale=self.scale, first_dq=first, first_dkv=first,
        )  # fmt: skip

    def finish_gradients(self) -> tuple[Tensor, ...]:
        dtype = self.inputs.q.dtype
        return (
            *self.kernel.finish("dq", self.dq, dtype=dtype, softmax_scale=self.scale),
            *self.kernel.finish("dkv", self.dkv, dtype=dtype, softmax_scale=self.scale),
        )

    def backward_total(self) -> tuple[Tensor, ...]:
        self._backward(self.row_delta(), True)
        return self.finish_gradients()

    def results(self) -> Results:
        out = self.forward_total()
        return Results(out, *self.backward_total())

    def step(self) -> Results:
        """As ``results``, but the backward takes the lse and out of this forward, not those of the first."""
        self.finished = self.forward_total()
        self.lse.copy_(self.out["lse"])
        return Results(self.finished, *self.backward_total())

    def doubled_results(self) -> Results:
        """Of the block merged with itself and its gradients added to themselves, then halved: the same
        numbers."""
        self.forward()
        self.forward(first=False)
        out = self.finish_out()
        self.backward()
        self.backward(first=False)
        dq, dk, dv = (x / 2 for x in self.finish_gradients())
        return Results(out, dq, dk, dv)
