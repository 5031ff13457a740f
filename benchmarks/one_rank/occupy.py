"""A kernel that holds multiprocessors for a while, as NCCL's do beside ours."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

WARPS = 8
"""So many registers are then held that no thread block of the Hopper kernels, which take all, fits beside."""


@triton.jit
def _wait(nanoseconds: tl.constexpr):  # type: ignore[no-untyped-def]
    begin = globaltimer()
    while globaltimer() - begin < nanoseconds:
        pass


def occupy(multiprocessors: int, milliseconds: float, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Hold so many multiprocessors from now on; the event comes when they are free again."""
    kernel: Any = _wait
    with torch.cuda.stream(stream):
        kernel[(multiprocessors,)](int(milliseconds * 1e6), num_warps=WARPS)
        event: torch.cuda.Event = stream.record_event()
    return event
