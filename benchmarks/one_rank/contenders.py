"""Everything that is timed, behind one small interface: inputs in, passes to run, results to check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshattn_kernels import (
    UNBOUNDED,
    AccumulatorKind,
    ArrayIntervals,
    AttentionKernel,
    BandIntervals,
    Intervals,
    accumulator_dtype,
    get_kernel,
)
from meshattn_kernels.contract import new_accumulator
from meshattn_kernels.delta import row_delta
from one_rank.attention_cases import (
    ADDING,
    BACKWARD,
    BACKWARD_TOTAL,
    FORWARD,
    FORWARD_TOTAL,
    MERGING,
    Case,
)


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


def intervals_of(case: Case, device: torch.device) -> Intervals:
    """The mask of a case."""
    if case.documents:
        start, end = case.first_keys(), range(1, case.rows + 1)
        bounds = (torch.tensor(bound, dtype=torch.int32, device=device) for bound in (start, end))
        return ArrayIntervals(*bounds, case.rows, case.rows)
    low, high = 0 if case.causal else -UNBOUNDED, case.window - 1 if case.window else UNBOUNDED
    return BandIntervals(low, high, case.rows, case.num_keys)


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
    """A kernel of ``meshattn_kernels`` over one block, its accumulators poisoned at first.

    The total passes are those of one rank, where the block is all that there is: a kernel that can writes
    its results in the type of the inputs then.
    """

    kernel: AttentionKernel
    case: Case
    inputs: Inputs
    mask: Intervals | None = None
    """None is the mask of the case."""

    def __post_init__(self) -> None:
        case = self.case
        self.scale = case.head_dim**-0.5
        self.intervals = self.mask or intervals_of(case, self.inputs.q.device)
        self.dtype = self.inputs.q.dtype
        exact = accumulator_dtype(self.dtype)
        self.out, self.dkv = self._poisoned("out", exact), self._poisoned("dkv", exact)
        self.dq = self._poisoned("dq", exact)
        self.whole_out, self.whole_dq, self.whole_dkv = self.out, self.dq, self.dkv
        if "out" in self.kernel.writes_finished:
            self.whole_out = self._poisoned("out", self.dtype)
        if "dq" in self.kernel.writes_finished:
            self.whole_dq = self._poisoned("dq", self.dtype)
        if "dkv" in self.kernel.writes_finished:
            self.whole_dkv = self._poisoned("dkv", self.dtype)
        self.finished = self.forward_total()
        self.lse = self.whole_out["lse"].clone()
        self.delta = self.row_delta()

    def _poisoned(self, kind: AccumulatorKind, dtype: torch.dtype) -> dict[str, Tensor]:
        q, k, v = self.inputs.q, self.inputs.k, self.inputs.v
        acc = new_accumulator(self.kernel, kind, q, k, v, dtype=dtype)
        return {name: tensor.fill_(math.nan) for name, tensor in acc.items()}

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
        self._forward(self.inputs.v, self.out, first)

    def _forward(self, v: Tensor, out: Mapping[str, Tensor], first: bool) -> None:
        q, k = self.inputs[:2]
        self.kernel.forward(q, k, v, out, self.intervals, softmax_scale=self.scale, first=first)

    def forward_total(self) -> Tensor:
        self._forward(self.inputs.v, self.whole_out, True)
        return self._finish("out", self.whole_out)[0]

    def _finish(self, kind: AccumulatorKind, acc: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return self.kernel.finish(kind, acc, dtype=self.dtype, softmax_scale=self.scale)

    def row_delta(self) -> Tensor:
        return row_delta(self.inputs.do, self.finished)

    def backward(self, first: bool = True) -> None:
        self._backward(self.delta, self.dq, self.dkv, first)

    def _backward(
        self, delta: Tensor, dq: Mapping[str, Tensor], dkv: Mapping[str, Tensor], first: bool
    ) -> None:
        self.kernel.backward(
            *self.inputs, self.lse, delta, dq, dkv, self.intervals,
            softmax_scale=self.scale, first_dq=first, first_dkv=first,
        )  # fmt: skip

    def finish_gradients(self) -> tuple[Tensor, ...]:
        """dq, dk, dv of the last whole backward."""
        return *self._finish("dq", self.whole_dq), *self._finish("dkv", self.whole_dkv)

    def backward_total(self) -> tuple[Tensor, ...]:
        self._backward(self.row_delta(), self.whole_dq, self.whole_dkv, True)
        return self.finish_gradients()

    def results(self) -> Results:
        out = self.forward_total()
        return Results(out, *self.backward_total())

    def step(self) -> Results:
        """As ``results``, but the backward takes the lse and out of this forward, not those of the first."""
        self.finished = self.forward_total()
        self.lse.copy_(self.whole_out["lse"])
        return Results(self.finished, *self.backward_total())

    def plain_results(self) -> Results:
        """As ``results``, by float32 accumulators."""
        self.forward()
        self.backward()
        (out,), (dq,) = self._finish("out", self.out), self._finish("dq", self.dq)
        return Results(out, dq, *self._finish("dkv", self.dkv))

    def doubled_results(self) -> Results:
        """By two blocks, the second with twice the values, so that out is 1.5 times as large, and gradients
        added to themselves. Divided by that, they are the same numbers."""
        self.forward()
        self._forward(2 * self.inputs.v, self.out, False)
        self.backward()
        self.backward(first=False)
        (out,), (dq,) = self._finish("out", self.out), self._finish("dq", self.dq)
        dk, dv = self._finish("dkv", self.dkv)
        return Results(out / 1.5, dq / 2, dk / 2, dv / 2)
