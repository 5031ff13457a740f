"""What a block takes, of which a mask may leave a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from .cost import CallShape
from .hops import Visibility
from .kernel_times import BLOCK_PASSES, BlockPass, KernelTimes


@dataclass(frozen=True)
class Mask:
    """Where blocks differ: what part of the pairs of query chunk p and key chunk q is visible, 0 to 1."""

    chunks: int
    part: Callable[[int, int], float]

    @cached_property
    def parts(self) -> tuple[tuple[float, ...], ...]:
        """``parts[p][q]`` is ``part(p, q)``."""
        chunks = range(self.chunks)
        return tuple(tuple(self.part(p, q) for q in chunks) for p in chunks)

    @cached_property
    def visibility(self) -> Visibility:
        return Visibility(tuple(sum((part > 0) << q for q, part in enumerate(row)) for row in self.parts))


def partial_us(part: float, half: float, whole: float) -> float:
    """Time of a block of which a part is visible, by a straight line through nothing, the half and all."""
    return 2 * part * half if part <= 0.5 else half + (2 * part - 1) * (whole - half)


def block_times(
    kernels: KernelTimes, shape: CallShape, parts: int = 1
) -> dict[BlockPass, tuple[float, float]]:
    """Microseconds of a block, or of one of its parts, half visible and all of it."""

    def us(what: BlockPass, causal: bool) -> float:
        return kernels.us(
            what,
            heads=shape.batch * shape.heads,
            kv_heads=shape.batch * shape.kv_heads,
            rows=shape.rows,
            keys=-(-shape.chunk_keys // parts),
            head_dim=max(shape.head_dim, shape.head_dim_v),
            causal=causal,
        )

    return {what: (us(what, True), us(what, False)) for what in BLOCK_PASSES}
