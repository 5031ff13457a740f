"""How long a kernel takes for a block: a table of measured blocks, and what lies between them.

A block is a chunk of queries against a chunk of keys. Its rate (visible pairs, heads and head size a
microsecond) grows with its size and with the number of heads until the GPU is full; between the entries of
the table the logarithm of the rate is a straight line over those of rows and of heads. Beyond the largest
block of so many heads the rate stays, or is that of a block with more heads and fewer rows that has as many
tiles, which is no faster; so it is for fewer heads than any entry has. Below the smallest block the time
stays. No entry is left out and none is fitted, so a block that is in the table takes the time that is written
there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from .cost import ITEMSIZES

BlockPass = Literal["forward", "merging", "backward", "adding"]
"""Into new accumulators (forward, backward) or into those that hold earlier blocks (merging, adding)."""
BLOCK_PASSES: tuple[BlockPass, ...] = ("forward", "merging", "backward", "adding")

MOST = 2**50
"""Of every size and of bytes, so that their products are numbers to compute with."""

MOST_WORK = 2**45
"""Heads times squared rows of a block that anyone would time: its passes take some minutes on a large GPU."""

Curve = Sequence[tuple[float, float]]
"""(logarithm of a size, logarithm of a rate), by size."""


@dataclass(frozen=True)
class BlockTime:
    """Microseconds of a square block of ``rows`` query and as many key rows, half of it visible if causal."""

    head_dim: int
    heads: int
    kv_heads: int
    rows: int
    causal: bool
    forward: float
    merging: float
    backward: float
    adding: float
    workspace: int = 0
    """Bytes that the kernel keeps for itself while it computes the backward; 0 where nobody has looked."""

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise ValueError(f"kernel times: causal of a block is {self.causal!r}, but must be true or false")
        for name in ("head_dim", "heads", "kv_heads", "rows", "workspace"):
            value, least = getattr(self, name), 0 if name == "workspace" else 1
            if type(value) is not int or not least <= value <= MOST:
                raise ValueError(
                    f"kernel times: {name} of a block is {value!r}, but must be a whole number from {least} "
                    f"to {MOST}"
                )
        for name in BLOCK_PASSES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-9 <= value <= 1e15:
                raise ValueError(
                    f"kernel times: {name} of a block is {value!r}, but must be from 1e-9 to 1e15"
                )


@dataclass(frozen=True)
class Origin:
    """Where a table comes from, for people; empty where a file does not say it."""

    device: str = ""
    versions: str = ""
    date: str = ""

    def __str__(self) -> str:
        return ", ".join(part for part in (self.device, self.versions, self.date) if part)


@dataclass(frozen=True)
class KernelTimes:
    """The table of one kernel on one GPU, for inputs of one type."""

    kernel: str
    blocks: tuple[BlockTime, ...]
    dtype: str | None = None
    """Of q, k and v, as `cost.ITEMSIZES` names it; None where a file does not say it."""
    where: Origin = field(default=Origin(), compare=False, repr=False)
    """No part of what is planned: topologies are equal if their times are."""

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("kernel times: there is no block in the table; give at least one")
        if self.dtype is not None and self.dtype not in tuple(ITEMSIZES):  # whatever a file has: also a list
            raise ValueError(
                f"kernel times: dtype is {self.dtype!r}, but must be one of {', '.join(ITEMSIZES)}"
            )

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> KernelTimes:
        """From ``kernel`` and ``block_us`` of a file; ValueError for a block that lacks a size or time."""
        if not isinstance(data, Mapping) or not isinstance(data.get("block_us"), Sequence):
            raise ValueError(
                "kernel times: this is no table, which has kernel and block_us, a list of blocks"
            )
        names = [part.name for part in fields(BlockTime) if part.name != "workspace"]
        blocks = []
        for number, entry in enumerate(data["block_us"]):
            if not isinstance(entry, Mapping):
                raise ValueError(f"kernel times: block {number} is {entry!r}, but must have sizes and times")
            missing = [name for name in names if name not in entry]
            if missing:
                raise ValueError(f"kernel times: block {number} has no {', '.join(missing)}")
            values = {name: entry[name] for name in names}
            blocks.append(BlockTime(**values, workspace=entry.get("workspace", 0)))
        where = data.get("where")
        if not isinstance(where, Mapping):
            where = {}
        origin = Origin(**{part.name: str(where.get(part.name, "")) for part in fields(Origin)})
        return cls(str(data.get("kernel", "unknown")), tuple(blocks), data.get("dtype"), origin)

    def describe(self) -> str:
        """Kernel, type, and where it was measured."""
        return ", ".join(part for part in (self.kernel, self.dtype, str(self.where)) if part)

    def as_data(self) -> dict[str, Any]:
        """What ``read`` reads."""
        said = {"kernel": self.kernel, "dtype": self.dtype, "where": asdict(self.where)}
        return {**said, "block_us": [asdict(block) for block in self.blocks]}

    def us(
        self, what: BlockPass, *, heads: int, kv_heads: int, rows: int, keys: int, head_dim: int, causal: bool
    ) -> float:
        """Microseconds of a block of ``rows`` by ``keys``; several sequences count as more heads.

        An oblong block has the rate of the square with as many pairs. Where the table lacks the head size,
        the mask or shared key/value heads, the nearest that it has is taken, at the same rate.
        """
        curves, full = self._curves(what, head_dim, causal, heads > kv_heads)
        size = math.log(rows * keys) / 2

        def known(heads: int) -> float:
            """The best of blocks of so many heads, or of more and as many tiles, which are no faster."""
            more = [(math.log(heads / n), curve) for n, curve in curves if n >= heads]
            return max(_at(curve, size + fewer, slope=2.0) for fewer, curve in more)

        by_heads = [
            (math.log(n), known(n) if size > curve[-1][0] else _at(curve, size, slope=2.0))
            for n, curve in curves
        ]
        rate = _at(by_heads, math.log(heads), slope=1.0)
        if heads < curves[0][0]:
            rate = max(rate, known(heads))
        times = 0.5 if causal and full else 2.0 if not (causal or full) else 1.0
        return times * rows * keys * heads * head_dim / math.exp(rate)

    def workspace(self, *, heads: int, kv_heads: int, keys: int, head_dim: int, causal: bool) -> int:
        """Bytes that the kernel keeps for itself in the backward of a block: those of the table, or those of
        the blocks next to it in rows, in proportion to keys, heads and head size, the more of both."""
        sizes = heads, kv_heads, keys, head_dim, causal
        if sizes not in self._workspaces:
            self._workspaces[sizes] = self._workspace(*sizes)
        return self._workspaces[sizes]

    @cached_property
    def _workspaces(self) -> dict[tuple[int, int, int, int, bool], int]:
        return {}

    def _workspace(self, heads: int, kv_heads: int, keys: int, head_dim: int, causal: bool) -> int:
        def apart(block: BlockTime) -> tuple[float, ...]:
            group = block.heads * kv_heads / (block.kv_heads * heads)
            ratios = block.head_dim / head_dim, group, block.heads / heads
            return *(abs(math.log(ratio)) for ratio in ratios), block.causal != causal

        nearest = min(map(apart, self.blocks))
        curve = [block for block in self.blocks if apart(block) == nearest]
        below = max((b for b in curve if b.rows <= keys), key=lambda b: b.rows, default=None)
        above = min((b for b in curve if b.rows >= keys), key=lambda b: b.rows, default=None)
        work = keys * heads * head_dim
        return max(b.workspace * work // (b.rows * b.heads * b.head_dim) for b in (below, above) if b)

    def lacks(
        self, *, heads: int, kv_heads: int, rows: int, keys: int, head_dim: int, causal: bool
    ) -> tuple[str, ...]:
        """What of a block lies outside of the table, so that ``us`` extrapolates it; between two entries of
        the table it does not."""
        kinds = {(block.head_dim, block.causal, block.heads > block.kv_heads) for block in self.blocks}
        shared = heads > kv_heads
        if (head_dim, causal, shared) not in kinds:
            dims = sorted({dim for dim, _, _ in kinds})
            if head_dim not in dims:
                return (f"head size {head_dim} (the table has {', '.join(map(str, dims))})",)
            how = "that share key/value heads" if shared else "with key/value heads of their own"
            return (f"{'causal' if causal else 'full'} blocks of query heads {how}",)
        curves, _ = self._curves("forward", head_dim, causal, shared)
        numbers = [number for number, _ in curves]
        found = []
        if not numbers[0] <= heads <= numbers[-1]:
            found.append(f"{_heads(heads)} (the table has {_span(numbers[0], numbers[-1])})")
        n = bisect_left(numbers, heads)
        near = [curve for number, curve in curves if number == heads]
        near = near or [curve for _, curve in curves[max(n - 1, 0) : n + 1]]
        size = math.log(rows * keys) / 2
        least, most = max(curve[0][0] for curve in near), min(curve[-1][0] for curve in near)
        if not least - 1e-9 <= size <= most + 1e-9:
            found.append(
                f"{round(math.exp(size))} rows of {_heads(heads)} (the table has "
                f"{_span(round(math.exp(least)), round(math.exp(most)))})"
            )
        return tuple(found)

    @cached_property
    def best_flops_per_us(self) -> float:
        """Of the forward: two products of two operations for every visible pair."""
        return max(
            4 * block.rows**2 * block.heads * block.head_dim / (2 if block.causal else 1) / block.forward
            for block in self.blocks
        )

    def _curves(
        self, what: BlockPass, head_dim: int, causal: bool, shared: bool
    ) -> tuple[Sequence[tuple[int, Curve]], bool]:
        """Curves by heads, and whether they are those of full blocks."""
        keys = self._tables[what]
        best = min(
            keys, key=lambda key: (abs(math.log(key[0] / head_dim)), key[1] != causal, key[2] != shared)
        )
        return keys[best], not best[1]

    @cached_property
    def _tables(self) -> dict[BlockPass, dict[tuple[int, bool, bool], list[tuple[int, Curve]]]]:
        """By pass, then (head size, causal, shared heads); the rate counts all pairs of a causal block."""
        tables: dict[BlockPass, dict[tuple[int, bool, bool], dict[int, list[tuple[float, float]]]]] = {}
        for what in BLOCK_PASSES:
            table = tables.setdefault(what, {})
            for block in sorted(self.blocks, key=lambda block: (block.heads, block.rows)):
                kind = block.head_dim, block.causal, block.heads > block.kv_heads
                rate = block.rows**2 * block.heads * block.head_dim / getattr(block, what)
                table.setdefault(kind, {}).setdefault(block.heads, []).append(
                    (math.log(block.rows), math.log(rate))
                )
        return {
            what: {kind: list(curves.items()) for kind, curves in table.items()}
            for what, table in tables.items()
        }


def _at(curve: Curve, x: float, slope: float) -> float:
    """The curve at x: straight between its points, level above the last, and below the first falling with
    ``slope``, as it does where the time no longer shrinks."""
    if x <= curve[0][0]:
        return curve[0][1] - slope * (curve[0][0] - x)
    if x >= curve[-1][0]:
        return curve[-1][1]
    n = bisect_left(curve, (x, -math.inf))
    (x0, y0), (x1, y1) = curve[n - 1], curve[n]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _heads(number: int) -> str:
    return f"{number} head{'' if number == 1 else 's'}"


def _span(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least} to {most}"
