"""How long a kernel takes for a block: a table of measured blocks, and what lies between them.

A block is a chunk of queries against a chunk of keys. Its rate (visible pairs, heads and head size a
microsecond) grows with its size and with the number of heads until the GPU is full; between the entries of
the table the logarithm of the rate is a straight line over those of rows and of heads. Beyond the largest
block the rate stays, below the smallest the time does. No entry is left out and none is fitted, so a block
that is in the table takes the time that is written there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal

BlockPass = Literal["forward", "merging", "backward", "adding"]
"""Into new accumulators (forward, backward) or into those that hold earlier blocks (merging, adding)."""
BLOCK_PASSES: tuple[BlockPass, ...] = ("forward", "merging", "backward", "adding")

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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if field.name != "causal" and not (number and 0 < value < math.inf):
                raise ValueError(f"kernel times: {field.name} of a block is {value!r}, but must be above 0")


@dataclass(frozen=True)
class KernelTimes:
    """The table of one kernel on one GPU."""

    kernel: str
    blocks: tuple[BlockTime, ...]

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("kernel times: there is no block in the table; give at least one")

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> KernelTimes:
        """From ``kernel`` and ``block_us`` of a file; ValueError for a block that lacks a size or time."""
        if not isinstance(data, Mapping) or not isinstance(data.get("block_us"), Sequence):
            raise ValueError(
                "kernel times: this is no table, which has kernel and block_us, a list of blocks"
            )
        names = [field.name for field in fields(BlockTime)]
        blocks = []
        for number, entry in enumerate(data["block_us"]):
            if not isinstance(entry, Mapping):
                raise ValueError(f"kernel times: block {number} is {entry!r}, but must have sizes and times")
            missing = [name for name in names if name not in entry]
            if missing:
                raise ValueError(f"kernel times: block {number} has no {', '.join(missing)}")
            blocks.append(BlockTime(**{name: entry[name] for name in names}))
        return cls(str(data.get("kernel", "unknown")), tuple(blocks))

    def as_data(self) -> dict[str, Any]:
        """What ``read`` reads."""
        return {"kernel": self.kernel, "block_us": [asdict(block) for block in self.blocks]}

    def us(
        self, what: BlockPass, *, heads: int, kv_heads: int, rows: int, keys: int, head_dim: int, causal: bool
    ) -> float:
        """Microseconds of a block of ``rows`` by ``keys``; several sequences count as more heads.

        An oblong block has the rate of the square with as many pairs. Where the table lacks the head size,
        the mask or shared key/value heads, the nearest that it has is taken, at the same rate.
        """
        curves, full = self._curves(what, head_dim, causal, heads > kv_heads)
        size = math.log(rows * keys) / 2
        by_heads = [(math.log(n), _at(curve, size, slope=2.0)) for n, curve in curves]
        rate = _at(by_heads, math.log(heads), slope=1.0)
        times = 0.5 if causal and full else 2.0 if not (causal or full) else 1.0
        return times * rows * keys * heads * head_dim / math.exp(rate)

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
