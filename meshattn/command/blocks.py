"""One block of a kernel with all its tensors: what a table of kernel times is made of, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from meshattn.plan.kernel_times import BlockPass
from meshattn_kernels import UNBOUNDED, AttentionKernel, BandIntervals
from meshattn_kernels.contract import ACCUMULATOR_KINDS, accumulator_dtype, clear_accumulator, new_accumulator


@dataclass(frozen=True)
class BlockSize:
    """A square block, half of which a causal one computes."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.rows} rows of {self.heads} heads ({self.kv_heads} of keys), {mask}"

    def accumulators(self, kernel: AttentionKernel) -> list[dict[str, tuple[int, ...]]]:
        """Shapes of those of out, dq and dkv, by name."""
        sizes = {"rows": self.rows, "heads": self.heads, "kv_heads": self.kv_heads}
        dims = {"head_dim": self.head_dim, "head_dim_v": self.head_dim}
        return [dict(kernel.accumulator_shapes(kind, batch=1, **sizes, **dims)) for kind in ACCUMULATOR_KINDS]

    def num_bytes(self, kernel: AttentionKernel) -> int:
        """Of its tensors, beside what the kernel keeps for itself."""
        inputs = 2 * self.rows * (self.heads + self.kv_heads) * self.head_dim  # q, do; k, v
        exact = 2 * self.rows * self.heads  # lse, delta
        exact += sum(prod(shape) for each in self.accumulators(kernel) for shape in each.values())
        return inputs * self.dtype.itemsize + exact * accumulator_dtype(self.dtype).itemsize


class Block:
    """Tensors of a block, and the passes over it: alone, or into accumulators that hold something."""

    def __init__(self, kernel: AttentionKernel, size: BlockSize, device: torch.device) -> None:
        rows, heads, dim = size.rows, size.heads, size.head_dim

        def normal(heads: int) -> Tensor:
            return torch.randn(1, rows, heads, dim, device=device, dtype=size.dtype)

        q, do, k, v = normal(heads), normal(heads), normal(size.kv_heads), normal(size.kv_heads)
        out, dq, dkv = (new_accumulator(kernel, kind, q, k, v) for kind in ACCUMULATOR_KINDS)
        for acc in (out, dq, dkv):
            clear_accumulator(acc)
        intervals = BandIntervals(0 if size.causal else -UNBOUNDED, UNBOUNDED, rows, rows)
        scale = dim**-0.5

        def forward(first: bool) -> None:
            kernel.forward(q, k, v, out, intervals, softmax_scale=scale, first=first)

        forward(True)
        lse, delta = out["lse"].clone(), torch.zeros_like(out["lse"])

        def backward(first: bool) -> None:
            kernel.backward(
                q, k, v, do, lse, delta, dq, dkv, intervals,
                softmax_scale=scale, first_dq=first, first_dkv=first,
            )  # fmt: skip

        self.passes: dict[BlockPass, Callable[[], None]] = {
            "forward": partial(forward, True),
            "merging": partial(forward, False),
            "backward": partial(backward, True),
            "adding": partial(backward, False),
        }


def workspace_of(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that kernels take while they run and give back, at the most; 0 on CPUs, where nobody counts them.
    Tables that a kernel makes at its first run and keeps are not among them."""
    if device.type != "cuda":
        run()
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
