"""What every attention kernel offers: a block of queries against a block of keys, added into accumulators.

Letters: B batch, H and H_kv query and key/value heads (query head h uses key/value head h // (H / H_kv)),
C_q and C_k rows of a query and a key/value chunk, D head size of q and k, D_v head size of v and out.

Accumulators are dictionaries of tensors whose memory belongs to the caller: it asks for the shapes, cuts them
out of one flat buffer of the accumulator type (float32; float64 for float64 inputs) so that one message moves
them, and adds or merges whole accumulators elementwise. The order of elements in ``dq``, ``dk`` and ``dv`` is
the kernel's own and the same on every rank; only ``finish`` gives it meaning. ``out`` and ``lse`` have the
shapes below, always.

Rows at and beyond n_q and n_k of the intervals are padding: they are never read, not even to be multiplied by
zero, so they may hold NaN. Query rows that are padding or see no key have out 0, lse -inf and a zero
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from meshattn_kernels.intervals import Intervals

AccumulatorKind = Literal["out", "dq", "dkv"]
ACCUMULATOR_KINDS: tuple[AccumulatorKind, ...] = ("out", "dq", "dkv")


Shapes = dict[str, tuple[int, ...]]


class ChunkSizes(TypedDict):
    """What the shapes of a chunk's accumulators follow from."""

    batch: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int


def rows_first(kind: AccumulatorKind, **sizes: Unpack[ChunkSizes]) -> Shapes:
    """Shapes in the order of the inputs: [B, C, H, D]; lse [B, H, C]."""
    batch, rows, heads = sizes["batch"], sizes["rows"], sizes["heads"]
    keys = batch, rows, sizes["kv_heads"]
    if kind == "out":
        return {"out": (batch, rows, heads, sizes["head_dim_v"]), "lse": (batch, heads, rows)}
    if kind == "dq":
        return {"dq": (batch, rows, heads, sizes["head_dim"])}
    return {"dk": (*keys, sizes["head_dim"]), "dv": (*keys, sizes["head_dim_v"])}


def heads_first(kind: AccumulatorKind, **sizes: Unpack[ChunkSizes]) -> Shapes:
    """As ``rows_first`` with gradients as [B, H, C, D]; out and lse have one order only."""
    shapes = rows_first(kind, **sizes)
    if kind == "out":
        return shapes
    return {name: (batch, heads, rows, dim) for name, (batch, rows, heads, dim) in shapes.items()}


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of lse, delta and all accumulators for inputs of type ``dtype``: float32, or float64 for
    float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def new_accumulator(
    kernel: AttentionKernel,
    kind: AccumulatorKind,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """An accumulator for such chunks in tensors of their own, not initialised; ``dtype`` instead of the
    accumulator type is for what a kernel writes finished."""
    batch, _, heads, head_dim = q.shape
    shapes = kernel.accumulator_shapes(
        kind,
        batch=batch,
        rows=(k if kind == "dkv" else q).shape[1],
        heads=heads,
        kv_heads=k.shape[2],
        head_dim=head_dim,
        head_dim_v=v.shape[3],
    )
    exact = accumulator_dtype(q.dtype)
    types = {name: exact if name == "lse" else dtype or exact for name in shapes}
    return {name: torch.empty(shape, dtype=types[name], device=q.device) for name, shape in shapes.items()}


def clear_accumulator(acc: Mapping[str, Tensor]) -> None:
    """Write the neutral element, the same for every kernel: out 0 and lse -inf, gradients 0."""
    for name, tensor in acc.items():
        tensor.fill_(-math.inf if name == "lse" else 0.0)


def add_accumulator(acc: Mapping[str, Tensor], plus: Mapping[str, Tensor]) -> None:
    """Add another accumulator of dq or of dk, dv to ``acc``, the same for every kernel."""
    for name, tensor in acc.items():
        tensor.add_(plus[name])


class AttentionKernel(Protocol):
    """Attention of one pair of chunks on one device."""

    @property
    def name(self) -> str: ...

    @property
    def deterministic(self) -> bool:
        """Whether equal inputs give equal bits on every run."""
        ...

    @property
    def writes_finished(self) -> frozenset[AccumulatorKind]:
        """Kinds whose accumulators may have the type of the inputs (all but lse), unless that is float32,
        where one block, with ``first``, is all that they ever get: the kernel then writes the result, and
        ``finish`` returns these tensors as they are."""
        ...

    def accumulator_shapes(self, kind: AccumulatorKind, **sizes: Unpack[ChunkSizes]) -> Shapes:
        """Names and shapes of the tensors of an accumulator for a chunk: ``rows_first``, ``heads_first`` or
        another order.

        out: ``{"out": (B, C, H, D_v), "lse": (B, H, C)}``; dq: ``{"dq"}``; dkv: ``{"dk", "dv"}``.
        """
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        acc: Mapping[str, Tensor],
        intervals: Intervals,
        *,
        softmax_scale: float,
        first: bool,
    ) -> None:
        """Merge the attention of q to this block's keys into ``acc`` (normalised out, natural-log lse).

        q [B, C_q, H, D], k [B, C_k, H_kv, D], v [B, C_k, H_kv, D_v], any strides. With ``first`` the
        accumulator holds garbage and is overwritten.
        """
        ...

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        lse: Tensor,
        delta: Tensor,
        dq: Mapping[str, Tensor],
        dkv: Mapping[str, Tensor],
        intervals: Intervals,
        *,
        softmax_scale: float,
        first_dq: bool,
        first_dkv: bool,
    ) -> None:
        """Add this block's part of the gradients into ``dq`` and ``dkv``.

        do [B, C_q, H, D_v]; lse and delta [B, H, C_q] of the whole row (over all keys of the sequence), in
        the accumulator type, with delta = rowsum(do * out). With ``first_*`` that accumulator is overwritten.
        """
        ...

    def finish(
        self,
        kind: AccumulatorKind,
        acc: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        softmax_scale: float,
        plus: Mapping[str, Tensor] | None = None,
        into: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """The result in ``dtype``: (out [B, C, H, D_v],), (dq [B, C, H, D],), or (dk, dv) [B, C, H_kv, D or
        D_v]. ``plus`` is a second accumulator of dq or of dk, dv, in any float type, that is added first;
        ``acc`` may then hold the sum or not. ``into`` are contiguous tensors of ``dtype`` to write to instead
        of new ones."""
        ...


def without_lse(acc: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What becomes the results."""
    return {name: tensor for name, tensor in acc.items() if name != "lse"}


def written_finished(acc: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, ...] | None:
    """The results, if the kernel has written them itself (`writes_finished`). Tensors of float32 are
    accumulators, also if one asks for results of that type."""
    results = tuple(without_lse(acc).values())
    return results if dtype != torch.float32 and all(x.dtype == dtype for x in results) else None


def delivered(results: tuple[Tensor, ...], into: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    """What ``finish`` returns: the results, copied to where they are wanted."""
    if into is None:
        return results
    for wanted, result in zip(into, results, strict=True):
        wanted.copy_(result)
    return tuple(into)
