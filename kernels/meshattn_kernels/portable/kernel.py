"""The portable kernels as objects: see ``meshattn_kernels.contract.AttentionKernel`` for the methods.

All accumulators have rows first, like their results: finishing them is one flat pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from meshattn_kernels.contract import (
    AccumulatorKind,
    ChunkSizes,
    Shapes,
    add_accumulator,
    clear_accumulator,
    delivered,
    rows_first,
    without_lse,
    written_finished,
)
from meshattn_kernels.dash import ScheduleTable, build_table, choose_schedule
from meshattn_kernels.device import Ready, ready_on
from meshattn_kernels.dispatch import check_call
from meshattn_kernels.dropout import Dropout
from meshattn_kernels.intervals import BandIntervals, Intervals
from meshattn_kernels.keeping import Tables, keep
from meshattn_kernels.portable.backward_dash import clear_rows_kernel, dash_kernel
from meshattn_kernels.portable.backward_two_loop import dkdv_kernel, dq_kernel
from meshattn_kernels.portable.flat import add_parts, row_terms, row_words, scale_into
from meshattn_kernels.portable.forward import forward_kernel
from meshattn_kernels.portable.launch import (
    INTERPRETED,
    RowBounds,
    Tiling,
    constants,
    num_workers,
    on_device,
    readable,
    row_bounds,
    strides,
    tiles_for,
)
from meshattn_kernels.portable.variants import Launcher
from meshattn_kernels.tile_ranges import visible_ranges

NOMINAL_PROGRAMS = 128
"""A group of query heads is cut into parts, each its own program, up to about so many programs. A constant
and not the number of multiprocessors, so that the order of sums follows from the shape."""

_NO_DROPOUT: tuple[int | float, ...] = 0, 1.0, 0, 0, 0, 0

_forward = Launcher(forward_kernel)
_dkdv = Launcher(dkdv_kernel)
_dq = Launcher(dq_kernel)
_dash = Launcher(dash_kernel, cooperative=True)
_clear_rows = Launcher(clear_rows_kernel)


def _finished(*kinds: AccumulatorKind) -> frozenset[AccumulatorKind]:
    """These, but on a GPU alone: the interpreter cuts off what torch and a GPU round, so that one rank would
    have other bits than several."""
    return frozenset() if INTERPRETED else frozenset(kinds)


@dataclass(frozen=True)
class _Scores:
    """What becomes of scores, for a launch.

    words       of the rows, for dropout; any tensor without.
    numbers     scale and ``scores.SCORE_NUMBERS``.
    changed     SOFTCAP, DROPOUT.
    """

    words: Tensor
    numbers: tuple[int | float, ...]
    changed: tuple[bool, bool]

    @property
    def dropout(self) -> bool:
        return self.changed[1]


@dataclass(frozen=True)
class _Block:
    """What the launches of a backward read."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    terms: Tensor
    intervals: Intervals
    bounds: RowBounds
    scores: _Scores
    softmax_scale: float

    def factor(self, acc: Tensor) -> float:
        """What a sum is still to be multiplied with where ``acc`` is no accumulator but the result."""
        return 1.0 if acc.dtype == torch.float32 else self.softmax_scale

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.do, self.terms, self.scores.words

    @property
    def mask(self) -> tuple[int, int, int, int]:
        """lo, hi, n_q, n_k."""
        return *self.bounds.band_of, self.intervals.n_q, self.intervals.n_k

    @cached_property
    def _strides(self) -> tuple[int, list[int]]:
        return strides(self.q, self.k, self.v, self.do)

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """Those that all kernels of a backward end with."""
        return *self.scores.numbers, *self._strides[1]

    def constants(self, tiles: Tiling) -> tuple[int | bool, ...]:
        """Those that all kernels of a backward begin with, up to BAND."""
        unit, inputs = self._strides[0], (self.q, self.k, self.v, self.do)
        return unit, *constants(tiles, *inputs), *self.scores.changed, self.bounds.band


@dataclass(frozen=True)
class _Portable:
    """All but the backward. ``softcap`` bounds the scores (0: no bound), ``dropout`` is that of the pair of
    chunks."""

    softcap: float = 0.0
    dropout: Dropout | None = None

    name: ClassVar[str]
    writes_finished: ClassVar[frozenset[AccumulatorKind]] = _finished("out")

    def _scores(self, q: Tensor, softmax_scale: float) -> _Scores:
        scale, cap_scale = softmax_scale, 1.0
        if self.softcap:
            scale, cap_scale = self.softcap, softmax_scale / self.softcap
        words, numbers = q, _NO_DROPOUT
        if self.dropout is not None:
            words, numbers = row_words(self.dropout, q), self.dropout.key_numbers
        return _Scores(words, (scale, cap_scale, *numbers), (self.softcap > 0, self.dropout is not None))

    def accumulator_shapes(self, kind: AccumulatorKind, **sizes: Unpack[ChunkSizes]) -> Shapes:
        return rows_first(kind, **sizes)

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
        results = written_finished(acc, dtype)
        if results is not None:
            return delivered(results, into)
        if plus is not None:
            add_accumulator(acc, plus)
        sums = without_lse(acc)
        into = into or [torch.empty_like(x, dtype=dtype) for x in sums.values()]
        for (name, x), result in zip(sums.items(), into, strict=True):
            if name in ("dq", "dk"):
                scale_into(result, x, softmax_scale)
            else:
                result.copy_(x)
        return tuple(into)

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
        check_call(self.name, q, k, v, softmax_scale)
        if _is_empty_band(intervals):
            if first:
                clear_accumulator(acc)
            return
        out, lse = acc["out"], acc["lse"]
        q, k, v = readable(q), readable(k), readable(v)
        batch, rows, heads, _ = q.shape
        scores = self._scores(q, softmax_scale)
        unit, steps = strides(q, k, v)
        tiles = tiles_for("forward", q, v, scores.dropout)
        bounds = row_bounds(intervals, lse)
        with on_device(q.device):
            _forward(
                (-(-rows // tiles.q_tile), heads, batch),
                (q, k, v, scores.words, out, lse, bounds.start, bounds.end),
                (
                    *bounds.band_of, intervals.n_q, intervals.n_k, rows, heads // k.shape[2],
                    *scores.numbers, *steps,
                ),
                (unit, *constants(tiles, q, k, v), *scores.changed, bounds.band, first, tiles.held),
                warps=tiles.warps,
            )  # fmt: skip

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
        check_call(self.name, q, k, v, softmax_scale)
        if _is_empty_band(intervals):
            if first_dq:
                clear_accumulator(dq)
            if first_dkv:
                clear_accumulator(dkv)
            return
        q, k, v, do = readable(q), readable(k), readable(v), readable(do)
        scores = self._scores(q, softmax_scale)
        terms, bounds = row_terms(lse, delta, intervals.n_q, q.dtype), row_bounds(intervals, lse)
        block = _Block(q, k, v, do, terms, intervals, bounds, scores, softmax_scale)
        self._backward(block, dq["dq"], dkv, first_dq, first_dkv)

    def _backward(
        self, block: _Block, dq: Tensor, dkv: Mapping[str, Tensor], first_dq: bool, first_dkv: bool
    ) -> None:
        """``backward`` of a block that is not empty."""
        raise NotImplementedError


@dataclass(frozen=True)
class TritonKernel(_Portable):
    """The backward of two loops and seven products, which waits for nothing."""

    name: ClassVar[str] = "triton"
    deterministic: ClassVar[bool] = True
    writes_finished: ClassVar[frozenset[AccumulatorKind]] = _finished("out", "dq", "dkv")

    def _backward(
        self, block: _Block, dq: Tensor, dkv: Mapping[str, Tensor], first_dq: bool, first_dkv: bool
    ) -> None:
        _two_loop_dkdv(block, dkv, first_dkv)
        _two_loop_dq(block, dq, first_dq)


@dataclass(frozen=True, eq=False)
class _Placed:
    """A schedule on a device, and when it is there."""

    table: ScheduleTable
    ready: Ready | None


_placed: Tables[_Placed] = Tables(256)


@dataclass(frozen=True)
class TritonDashKernel(_Portable):
    """The backward of five products, whose sums follow a table.

    Args:
        softcap, dropout: as those of the other kernels.
        workers: resident thread blocks, by default one a multiprocessor (one in the interpreter).
        schedule: a name of ``meshattn_kernels.dash``, by default the one chosen for the shape.
        deterministic: False adds to dq in any order, as a control for measurements.
    """

    workers: int | None = None
    schedule: str | None = None
    deterministic: bool = True

    name: ClassVar[str] = "triton-dash"

    def _backward(
        self, block: _Block, dq: Tensor, dkv: Mapping[str, Tensor], first_dq: bool, first_dkv: bool
    ) -> None:
        q, bounds = block.q, block.bounds
        batch, rows, heads, head_dim = q.shape
        _, keys, kv_heads, _ = block.v.shape
        tiles = tiles_for("dash", q, block.v, block.scores.dropout)
        placed = self._table(q, block.k, block.intervals, tiles)
        table = placed.table
        counters = torch.zeros(
            batch * (heads * table.query_tiles + kv_heads * table.kv_tiles),
            dtype=torch.int32,
            device=q.device,
        )
        with on_device(q.device):
            keep(placed, placed.ready)
            if first_dq and not self.deterministic:
                dq.zero_()
            elif first_dq and len(table.unseen):
                width = heads * head_dim
                columns = min(1024, 1 << (width - 1).bit_length())
                grid = (len(table.unseen), -(-width // columns), batch)
                _clear_rows(grid, (table.unseen, dq), (rows, width), (tiles.q_tile, columns), warps=4)
            _dash(
                (table.workers, 1, 1),
                (
                    *block.tensors, dq, dkv["dk"], dkv["dv"], bounds.start, bounds.end, table.worker_start,
                    table.tasks, table.steps, counters,
                ),
                (
                    *block.mask, rows, keys, heads, kv_heads, batch * heads, table.query_tiles,
                    table.kv_tiles, *block.numbers,
                ),
                (*block.constants(tiles), first_dq, first_dkv, self.deterministic),
                warps=tiles.warps,
            )  # fmt: skip

    def _table(self, q: Tensor, k: Tensor, intervals: Intervals, tiles: Tiling) -> _Placed:
        batch, rows, heads, head_dim = q.shape
        keys, kv_heads = k.shape[1:3]
        workers = self.workers or num_workers(q.device)
        ranges = visible_ranges(intervals, rows, keys, tiles.q_tile, tiles.kv_tile)
        sizes: dict[str, Any] = {"heads": batch * heads, "kv_heads": batch * kv_heads, "workers": workers}

        def make() -> _Placed:
            if self.schedule is None:
                table = choose_schedule(ranges, head_dim=head_dim, **sizes)
            else:
                table = build_table(self.schedule, ranges, **sizes)
            return _Placed(table.to(q.device), ready_on(q.device))

        return _placed.get((q.device, ranges, self.schedule, head_dim, *sizes.values()), make)


def _two_loop_dkdv(block: _Block, dkv: Mapping[str, Tensor], first: bool) -> None:
    q, bounds = block.q, block.bounds
    batch, rows, heads, _ = q.shape
    _, keys, kv_heads, _ = block.v.shape
    tiles = tiles_for("dkdv", q, block.v, block.scores.dropout)
    kv_tiles = -(-keys // tiles.kv_tile)
    group = heads // kv_heads
    parts = group_parts(group, batch * kv_heads * kv_tiles)
    dk, dv = (
        acc if parts == 1 else torch.empty((parts, *acc.shape), dtype=torch.float32, device=acc.device)
        for acc in (dkv["dk"], dkv["dv"])
    )
    factor = block.factor(dkv["dk"])
    with on_device(q.device):
        _dkdv(
            (kv_tiles, kv_heads * parts, batch),
            (*block.tensors, dk, dv, bounds.start, bounds.end),
            (
                *block.mask, rows, keys, group, group // parts, batch * keys * kv_heads,
                factor if parts == 1 else 1.0, *block.numbers,
            ),
            (*block.constants(tiles), first or parts > 1, tiles.held),
            warps=tiles.warps,
        )  # fmt: skip
    if parts > 1:
        add_parts(dk, dkv["dk"], factor, first)
        add_parts(dv, dkv["dv"], 1.0, first)


def _two_loop_dq(block: _Block, dq: Tensor, first: bool) -> None:
    q, bounds = block.q, block.bounds
    batch, rows, heads, _ = q.shape
    tiles = tiles_for("dq", q, block.v, block.scores.dropout)
    with on_device(q.device):
        _dq(
            (-(-rows // tiles.q_tile), heads, batch),
            (*block.tensors, dq, bounds.start, bounds.end),
            (*block.mask, rows, heads // block.k.shape[2], block.factor(dq), *block.numbers),
            (*block.constants(tiles), first, tiles.held),
            warps=tiles.warps,
        )


def group_parts(group: int, tasks: int) -> int:
    """Parts of a group of query heads: the fewest that give enough programs, a divisor of the group."""
    parts = (part for part in range(1, group + 1) if group % part == 0)
    return next((part for part in parts if part * tasks >= NOMINAL_PROGRAMS), group)


def _is_empty_band(intervals: Intervals) -> bool:
    """Whether a launch can be spared. For arrays that would need a look at the device: their kernels look."""
    return isinstance(intervals, BandIntervals) and intervals.is_empty
